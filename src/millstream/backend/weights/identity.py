"""The identity of a model for its prefix cache on disk: a hash of all that keys and values depend on besides tokens."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

HASHED_SIZE = 1 << 20
"""Files up to this size count by their content, larger ones by their size and modification time."""


def identity_of(path: Path, *form: object) -> str:
    """`form`: whatever else decides what the model computes, such as its dtype."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    versions = [importlib.metadata.version(name) for name in ("mlx", "mlx-lm")]
    facts = [versions, [str(each) for each in form], [list(_describe(each)) for each in files]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _describe(file: Path) -> Iterable[object]:
    status = file.stat()
    yield from (file.name, status.st_size)
    if status.st_size <= HASHED_SIZE:
        yield hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        yield status.st_mtime_ns
