"""Remembers when each model of a cache was last loaded: by an empty file per model, whose time is that time.

The files' own access times would not do: many systems do not keep them, and a look at a header would change them.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from millstream.models.demo import user_cache_dir

log = logging.getLogger(__name__)


def mark_used(path: Path, cache_dir: Path | None = None) -> None:
    """`path`: of a model's folder or file. Failing to write is no reason not to load."""
    marker = _marker(path, cache_dir)
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        log.debug("cannot note that %s is used: %s", path, error)


def last_used(path: Path, cache_dir: Path | None = None) -> float | None:
    """Seconds since 1970. None if it was never loaded."""
    try:
        return _marker(path, cache_dir).stat().st_mtime
    except OSError:
        return None


def forget_used(path: Path, cache_dir: Path | None = None) -> None:
    _marker(path, cache_dir).unlink(missing_ok=True)


def _marker(path: Path, cache_dir: Path | None) -> Path:
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    return (cache_dir or user_cache_dir()) / "used" / name
