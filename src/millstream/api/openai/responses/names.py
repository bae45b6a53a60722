"""Names of tools in a namespace or of a tool server, as the model sees them."""

from __future__ import annotations

import re

_SEPARATOR = "__"
_OTHER = re.compile(r"[^a-zA-Z0-9_.-]")


def joined_name(namespace: str | None, name: str) -> str:
    """Joins a namespace and a name so that the result is the name of a function. Names without a namespace stay."""
    if namespace is None:
        return name
    return _OTHER.sub("_", f"{namespace.rstrip('_')}{_SEPARATOR}{name}")
