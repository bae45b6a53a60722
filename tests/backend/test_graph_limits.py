"""MLX's limits for CUDA graphs: ours unless the user has set them, and never on a Mac."""

from __future__ import annotations

import os

import pytest

from millstream.backend import environment

NAME = "MLX_MAX_MB_PER_BUFFER"


@pytest.mark.parametrize(
    ("platform", "before", "after"), [("linux", None, "4000"), ("linux", "50", "50"), ("darwin", None, None)]
)
def test_whose_limit_holds(
    platform: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.sys, "platform", platform)
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    environment.commit_large_graphs()
    found = os.environ.pop(NAME, None)
    assert found == after
