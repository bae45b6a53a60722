"""Options of what the server keeps for clients: stored responses, in memory or on disk."""

from __future__ import annotations

from pathlib import Path

from millstream.cli.arguments import duration, memory_size
from millstream.cli.serve_options.common import Group, with_default
from millstream.config import STORE_DIR_SECONDS, STORE_SECONDS


def add_store(group: Group) -> None:
    group.add_argument(
        "--store-dir",
        type=Path,
        metavar="FOLDER",
        help="folder for stored responses and the key that seals reasoning, so that a restart finds them "
        "(default: memory alone)",
    )
    group.add_argument(
        "--store-size",
        type=memory_size,
        metavar="SIZE",
        help=with_default("most bytes of stored responses; the least recently used ones give way", "256MiB"),
    )
    group.add_argument(
        "--store-age",
        type=duration,
        metavar="TIME",
        help=with_default(
            "how long a response is stored; 0: no limit",
            f"{STORE_SECONDS / 3600:g}h, with --store-dir {STORE_DIR_SECONDS / 3600:g}h",
        ),
    )
