"""The identity of a model for its prefix cache on disk: a hash of all that keys and values depend on besides tokens."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

import millstream

HASHED_SIZE = 1 << 20
"""Files up to this size count by their content, larger ones by their size and modification time."""
PROGRAMS = ("millstream", "mlx", "mlx-lm", "mlx-vlm", "numpy", "pillow")
"""The packages that compute keys and values, from pixels on."""
SOURCES = ("backend", "media")
"""The folders of ours that do. They count by their content: a version does not change while somebody works on them."""


def identity_of(path: Path, *form: object) -> str:
    """`form`: whatever else decides what the model computes, such as its dtype."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    versions = [_version(name) for name in PROGRAMS]
    facts = [versions, sources_hash(), [str(each) for each in form], [list(_describe(each)) for each in files]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@functools.cache
def sources_hash(root: Path = Path(millstream.__file__).parent) -> str:
    """Of two megabytes: some ten milliseconds, once for each process."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            content = file.read_bytes()
            found.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _version(name: str) -> str | None:
    """None if it is not installed: a server of text needs no mlx-vlm."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(file: Path) -> Iterable[object]:
    status = file.stat()
    yield from (file.name, status.st_size)
    if status.st_size <= HASHED_SIZE:
        yield hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        yield status.st_mtime_ns
