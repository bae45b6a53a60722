"""Headers of safetensors files: which files count, and the errors for damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from millstream.errors import ModelError
from millstream.models.safetensors_header import StoredTensor, folder_tensors
from support.zeros import write_zeros

TENSORS = {"lm_head.weight": ("BF16", (10, 8)), "model.norm.weight": ("F32", (8,))}


def test_type_shape_and_size_of_each_tensor(tmp_path: Path) -> None:
    found = folder_tensors(write_zeros(tmp_path, TENSORS))
    assert found == {
        "lm_head.weight": StoredTensor("BF16", (10, 8), 160),
        "model.norm.weight": StoredTensor("F32", (8,), 32),
    }
    assert found["lm_head.weight"].values == 80


def test_only_files_that_the_index_lists_count(tmp_path: Path) -> None:
    write_zeros(tmp_path, TENSORS)
    alone = folder_tensors(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not of this model")
    assert folder_tensors(tmp_path) == alone
    (tmp_path / "model-copy.safetensors").write_bytes(b"not of this model either")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model.safetensors"}}))
    assert folder_tensors(tmp_path) == alone
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"00001-of-00002\.safetensors: cannot be read: No such file"):
        folder_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: has no weight_map"):
        folder_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"\x10", "truncated"),
        (struct.pack("<Q", 2**60), "truncated"),
        (struct.pack("<Q", 4) + b"{{{{", "is not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "must be a JSON object"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "entry for 'a' is damaged"),
    ],
)
def test_a_damaged_file(tmp_path: Path, content: bytes, reason: str) -> None:
    write_zeros(tmp_path, TENSORS)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{reason}"):
        folder_tensors(tmp_path)


def test_a_truncated_download(tmp_path: Path) -> None:
    file = write_zeros(tmp_path, TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated: the tensors end at byte"):
        folder_tensors(tmp_path)
