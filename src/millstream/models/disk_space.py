"""Whether a download fits on its disk: asked before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from millstream.errors import ModelError
from millstream.models.sizes import size_text


def check_space(title: str, needed: int, folder: Path) -> None:
    """Raises `ModelError` that says how much is missing on the disk of `folder`, which may not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"{title} needs {size_text(needed)} on the disk of {folder}, which has {size_text(free)} free: "
            f"{size_text(needed - free)} are missing. 'millstream list' shows what could be removed; --cache-dir "
            "names a folder on another disk"
        )
