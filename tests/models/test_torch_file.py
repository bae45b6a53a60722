"""PyTorch's files: tensors are read, and nothing else in them is."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.errors import ModelError
from millstream.models.torch_file import TorchFile
from support.tiny_kokoro import save_torch


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def archive(path: Path, description: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", description)
        for name, data in members.items():
            file.writestr(f"archive/data/{name}", data)
    return path


def test_tensors_are_read(tmp_path: Path) -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float32)
    save_torch(OrderedDict(a=OrderedDict(b=first), c=second), tmp_path / "x.pth")
    file = TorchFile(tmp_path / "x.pth")
    assert {name: (each.dtype, each.shape) for name, each in file.stored.items()} == {
        "a.b": ("F32", (2, 3)),
        "c": ("F32", (4,)),
    }
    found = dict(file.read())
    np.testing.assert_array_equal(found["a.b"], first)
    np.testing.assert_array_equal(found["c"], second)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "x.pth", pickle.dumps({"a": Evil()}, protocol=2))
    with pytest.raises(ModelError, match=r"it names .*system, which is not a tensor"):
        TorchFile(path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("data", [b"", b"PK", b"nothing", pickle.dumps([1])])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ModelError, match=r"x\.pt"):
        TorchFile(tmp_path / "x.pt")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_torch(np.ones(1000, np.float32), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        description = file.read("archive/data.pkl")
    with pytest.raises(ModelError, match="truncated"):
        TorchFile(archive(tmp_path / "y.pt", description, **{"0": b"1234"}))
    with pytest.raises(ModelError, match="missing"):
        TorchFile(archive(tmp_path / "z.pt", description))
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"x\.pt"):
        TorchFile(tmp_path / "x.pt")
