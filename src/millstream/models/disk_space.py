"""Whether a download fits on its disk, asked before it begins, and whether a folder can be written to at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from millstream.errors import ModelError
from millstream.models.sizes import size_text

SOME_BYTES = 16 * 2**20
"""With less a disk counts as full: what is written next may fail."""


def has_room(folder: Path) -> bool:
    """False if its disk is full or read-only. `folder` may not exist yet."""
    try:
        found = os.statvfs(_existing(folder))
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= SOME_BYTES and not found.f_flag & os.ST_RDONLY


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_space(title: str, needed: int, folder: Path) -> None:
    """Raises `ModelError` that says how much is missing on the disk of `folder`, which may not exist yet."""
    free = shutil.disk_usage(_existing(folder)).free
    if needed > free:
        raise ModelError(
            f"{title} needs {size_text(needed)} on the disk of {folder}, which has {size_text(free)} free: "
            f"{size_text(needed - free)} are missing. 'millstream list' shows what could be removed; --cache-dir "
            "names a folder on another disk"
        )
