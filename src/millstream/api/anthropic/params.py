"""Parameters of Anthropic's API that this server does not support."""

from __future__ import annotations

from millstream.api.params import Neutrals

UNSUPPORTED: Neutrals = {
    "mcp_servers": ([],),
    "container": (),
    "thread": (),
}
"""Each name with the values, besides null, that have no effect."""
