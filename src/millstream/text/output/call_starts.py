"""Tells the start of a tool call from text: calls without a marker, and calls that a token limit has cut off."""

from __future__ import annotations

import re

from millstream.text.output.markers import MarkerFinder
from millstream.text.tool_formats.format import Schemas, ToolFormat, first_group

_MAX_BARE_HEAD = 256
"""A call without a marker must be recognised within so many characters, so that other answers are not delayed."""

_MIN_CUT = 5
"""So many characters of a marker are no coincidence: `<tool` is a call, `<` need not be."""

_BARE_FORMS = (
    '{"name":"NAME",',
    '{"function":"NAME",',
    '{"type":"function","name":"NAME",',
    '{"type":"function","function":"NAME",',
    "[NAME(",
)
"""Starts of calls without a marker, in all formats that have such calls."""

_SPACE = re.compile(r"\s+")


def begins_bare_call(
    text: str, tool_format: ToolFormat | None, schemas: Schemas, *, final: bool, cut: bool
) -> bool | None:
    """True if a call without a marker begins here. Returns None if it takes more text to tell.

    `final`: no more text will follow. `cut`: because a limit has ended it.
    """
    if tool_format is None or tool_format.bare is None or text[0] not in "{[":
        return False
    found = tool_format.bare.match(text)
    if found is not None:
        return found.end() <= _MAX_BARE_HEAD and first_group(found.groups()) in schemas
    if final:
        return cut and _is_cut_call(text, tool_format.bare, schemas)
    return None if len(text) < _MAX_BARE_HEAD else False


def begins_next_call(text: str, tool_format: ToolFormat, schemas: Schemas) -> bool:
    """True if text that was cut off after a complete call is the start of the next one, or of an end marker."""
    separators = tool_format.separators.match(text)
    rest = text[separators.end() if separators else 0 :]
    if not rest or rest.startswith('"'):
        return True
    markers = [marker for block in tool_format.blocks for marker in (block.start, *block.ends)]
    return any(
        any(start.startswith(known) or (len(start) > 1 and known.startswith(start)) for start in (text.strip(), rest))
        for known in (*markers, *tool_format.inner_markers, *schemas)
    )


def without_cut_marker(text: str, markers: MarkerFinder) -> int:
    """Returns the length of `text` without the part of a marker that it ends in, and the white space before that."""
    position, _ = markers.find(text, final=False)
    return len(text) if len(text) - position < _MIN_CUT else len(text[:position].rstrip())


def _is_cut_call(text: str, bare: re.Pattern[str], schemas: Schemas) -> bool:
    """True if `text` is the start of a call of a known function, white space aside."""
    start = _SPACE.sub("", text)
    calls = (form.replace("NAME", name) for form in _BARE_FORMS for name in schemas)
    return len(start) >= _MIN_CUT and any(call.startswith(start) and bare.match(call) for call in calls)
