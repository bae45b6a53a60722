"""Opens a file with PyAV, closed against everything else. Only in the child process: see `decoder`."""

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
# Nothing but the bytes that are here may be opened, whatever the file says.
_CLOSED = {"protocol_whitelist": "none", "enable_drefs": "0", "max_streams": "64"}
# Titles may be in any encoding. PyAV 19 takes that as it is; before, it had to be told.
_TITLES: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


@contextmanager
def open_closed(data: bytes, container: str, what: str) -> Iterator[InputContainer]:
    """`container`: FFmpeg's name of the reader. What FFmpeg finds wrong, here or later, is `MediaRefused`."""
    try:
        with av.open(io.BytesIO(data), "r", container, _CLOSED, io_open=_closed, **_TITLES) as file:
            yield file
    except av.FFmpegError as error:
        raise MediaRefused(f"this {what} is damaged: {error.strerror}. Send the file whole, as it was made") from error


def _closed(url: str, *_: Any) -> None:
    raise MediaRefused("a file refers to other files or hosts; send one that holds everything itself")
