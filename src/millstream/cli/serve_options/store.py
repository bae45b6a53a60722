"""Options of what the server keeps for clients: stored responses, in memory or on disk."""

from __future__ import annotations

from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import PATH, SIZE, TIME
from millstream.config import STORE_DIR_SECONDS, STORE_SECONDS

STORE = (
    Option(
        "store_dir",
        PATH,
        "folder for stored responses and the key that seals reasoning, so that a restart finds them",
        default_text="memory alone",
    ),
    Option("store_size", SIZE, "most bytes of stored responses; the least recently used ones give way"),
    Option(
        "store_age",
        TIME,
        "how long a response is stored; 0: no limit",
        default_text=f"{STORE_SECONDS / 3600:g}h, with --store-dir {STORE_DIR_SECONDS / 86400:g} days",
    ),
)
