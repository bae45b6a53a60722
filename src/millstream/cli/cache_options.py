"""What the commands about models on disk share: the cache folder, and names that are almost right."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path


def add_cache_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="folder of downloaded models, as in 'millstream serve --cache-dir' (default: the hub client's cache)",
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the most similar names, after a space; empty if none is similar."""
    names = list(known)
    lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)
    parts = [each for each in names if name.lower() in each.lower().split("/")[-1]] if not close else []
    found = [lower[each] for each in close] or parts[:3]
    return f" Did you mean {' or '.join(found)}?" if found else ""
