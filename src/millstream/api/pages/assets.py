"""The files of the pages, read into memory once: serving them never touches the disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "page"
"""Package data, in the wheel as well."""

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
"""The content type by the end of the name. Other files of the folder are not served."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file with what its response needs."""

    body: bytes
    content_type: str
    etag: str


@functools.cache
def read_assets() -> Mapping[str, Asset]:
    """Returns the files by their path below the folder, with slashes. Blocks: call it before the server starts."""
    return {
        path.relative_to(FOLDER).as_posix(): _read(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in TYPES and path.is_file()
    }


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
