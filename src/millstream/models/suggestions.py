"""Names that are almost right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the most similar names, after a space; empty if none is similar."""
    names = list(known)
    lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)
    parts = [each for each in names if name.lower() in each.lower().split("/")[-1]] if not close else []
    found = [lower[each] for each in close] or parts[:3]
    return f" Did you mean {' or '.join(found)}?" if found else ""
