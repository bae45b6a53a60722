"""Every text model type that the installed mlx-lm has, tiny: in a changing batch it gives what mlx-lm gives alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from equality import check
from model_types import model_types

ALONE = {
    "afm7": "its rotary offset comes from the shape of the keys",
    "deepseek_v41": "its cache is of a class of its own that cannot be batched",
    "gpt_bigcode": "it makes positions from one offset for all rows",
    "llama4": "its cache is chunked, which mlx-lm cannot batch either",
}
"""Types whose requests run one by one, and why. All others share a batch."""


@pytest.mark.parametrize("model_type", [*model_types()])
def test_a_changing_batch_of_every_type_is_what_mlx_lm_gives_alone(model_type: str, tmp_path: Path) -> None:
    verdict = check(model_type, tmp_path / model_type, disabled=frozenset({"calibration"}))
    if verdict.reason:
        pytest.skip(verdict.reason)
    assert verdict.equal, str(verdict)
    assert (verdict.rows == 1) == (model_type in ALONE), verdict.notes
