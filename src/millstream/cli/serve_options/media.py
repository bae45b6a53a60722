"""Options of images, audio and video in requests."""

from __future__ import annotations

from pathlib import Path

from millstream.cli.arguments import duration, memory_size, natural, positive
from millstream.cli.serve_options.common import DEFAULTS, Group, with_default


def add_media(group: Group) -> None:
    group.add_argument(
        "--media-folder",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="let requests name files in this folder; repeatable (default: none)",
    )
    group.add_argument("--media-bytes", type=memory_size, metavar="SIZE", help=with_default("largest file", "20MiB"))
    group.add_argument(
        "--media-pixels",
        type=positive,
        metavar="COUNT",
        help=with_default("most pixels of an image", DEFAULTS.media_pixels),
    )
    group.add_argument(
        "--media-count",
        type=natural,
        metavar="COUNT",
        help=with_default("most files per request", DEFAULTS.media_count),
    )
    group.add_argument(
        "--media-timeout",
        type=duration,
        metavar="TIME",
        help=with_default("seconds to download a file, and to decode a video", f"{DEFAULTS.media_timeout:g}"),
    )
    group.add_argument(
        "--media-seconds",
        type=duration,
        metavar="TIME",
        help=with_default("longest audio file, in seconds; a model may accept less", f"{DEFAULTS.media_seconds:g}"),
    )
    group.add_argument(
        "--media-memory",
        type=memory_size,
        metavar="SIZE",
        help=with_default("memory for the media of all requests; over it, requests wait or get a 503", "1GiB"),
    )
    group.add_argument(
        "--allow-private-media",
        action="store_true",
        help="download from private addresses too; anyone who can send requests can then reach your network",
    )
