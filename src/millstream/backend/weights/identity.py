"""What keys and values depend on besides tokens, as one word: another model, or another form of it, has another."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

READ_WHOLE = 1 << 20
"""Smaller files are taken by their content; larger ones by their size and time."""


def identity_of(path: Path, *form: object) -> str:
    """`form`: whatever else decides how the model computes."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    versions = [importlib.metadata.version(name) for name in ("mlx", "mlx-lm")]
    facts = [versions, [str(each) for each in form], [list(_describe(each)) for each in files]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _describe(file: Path) -> Iterable[object]:
    status = file.stat()
    yield from (file.name, status.st_size)
    if status.st_size <= READ_WHOLE:
        yield hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        yield status.st_mtime_ns
