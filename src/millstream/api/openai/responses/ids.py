"""Ids of responses and of their items.

The id of an item names its response and the generation that wrote it. So an item can be found again by its id alone,
and the items of one assistant turn can be told from those of the next, even if nothing stands between them.
"""

from __future__ import annotations

import re
import uuid

REASONING = "rs"
"""The prefix of reasoning items, at OpenAI too."""

_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})([0-9a-f]{2})[0-9a-f]{4}")
_SENT = 0xFF
"""Stands in place of the number of a generation in ids of items that a client sent."""


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def is_response_id(value: object) -> bool:
    """True if it may be an id of ours. Others are not asked for: a store may use ids as names of files."""
    return isinstance(value, str) and _RESPONSE.fullmatch(value) is not None


def item_id(prefix: str, response_id: str, generation: int, number: int) -> str:
    return f"{prefix}_{response_id.removeprefix('resp_')}{generation % _SENT:02x}{number:04x}"


def sent_item_id(prefix: str, response_id: str, number: int) -> str:
    """The id of an item that a client sent without one."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{_SENT:02x}{number:04x}"


def is_reasoning_id(item: str) -> bool:
    return item.startswith(f"{REASONING}_")


def response_of(item: str) -> str | None:
    """The response that an item belongs to. None if the id is not one of ours."""
    found = _ITEM.fullmatch(item)
    return None if found is None else f"resp_{found[1]}"


def turn_of(item: object) -> str | None:
    """Equal for items of one generation. None if that cannot be told from the id."""
    found = _ITEM.fullmatch(item) if isinstance(item, str) else None
    if found is None or int(found[2], 16) == _SENT:
        return None
    return found[1] + found[2]
