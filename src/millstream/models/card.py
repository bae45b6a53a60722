"""Reads the licence that a model card names. The card is untrusted: two lines are looked for, and no YAML is parsed."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.errors import ModelError
from millstream.models.files import TEXT_LIMIT, read_text

CARD = "README.md"
_METADATA = re.compile(r"\s*---[ \t]*\r?\n(.*?)\n---", re.DOTALL)
_LINE = r"^{}:[ \t]*['\"]?([^'\"\r\n#]{{1,100}})"


def licence_of(folder: Path) -> str | None:
    """The licence in the metadata of the card in this folder. None if there is none, or if it cannot be read."""
    path = folder / CARD
    try:
        if not path.is_file() or path.stat().st_size > TEXT_LIMIT:
            return None
        metadata = _METADATA.match(read_text(path).removeprefix("\ufeff"))
    except (ModelError, OSError):
        return None
    if metadata is None:
        return None
    found = (re.search(_LINE.format(field), metadata[1], re.MULTILINE) for field in ("license_name", "license"))
    return next((match[1].strip() for match in found if match), None)
