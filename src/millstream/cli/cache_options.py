"""What the commands about models on disk share: the cache folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

VARIABLE = "MILLSTREAM_CACHE_DIR"


def add_cache_dir(parser: argparse.ArgumentParser) -> None:
    folder = os.environ.get(VARIABLE)
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path(folder) if folder else None,
        metavar="FOLDER",
        help="folder of downloaded models, as in 'millstream serve --cache-dir' "
        f"(default: {VARIABLE}, or the hub client's cache)",
    )
