"""Opens a media file with PyAV from memory, without access to other files or the network. Child process only."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import av

from millstream.errors import MediaRefused

if TYPE_CHECKING:
    from av.container import InputContainer

THREADS = 2
# A file may name others to open (playlists, external tracks): FFmpeg must not follow.
_ISOLATED = {"protocol_whitelist": "none", "enable_drefs": "0", "max_streams": "64"}
# Metadata may be in any encoding. PyAV 19 accepts that by default; older versions need the option.
_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


@contextmanager
def open_isolated(data: bytes, container: str, label: str) -> Iterator[InputContainer]:
    """`container`: the name of FFmpeg's demuxer. Turns FFmpeg's errors, also later ones, into `MediaRefused`."""
    try:
        with av.open(io.BytesIO(data), "r", container, _ISOLATED, io_open=_refuse_open, **_METADATA) as file:
            yield file
    except av.FFmpegError as error:
        raise MediaRefused(f"this {label} is damaged: {error.strerror}. Send the complete original file") from error


def _refuse_open(url: str, *_: Any) -> None:
    raise MediaRefused("the file refers to other files or hosts; send one that is self-contained")
