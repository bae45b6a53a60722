"""From a file of video to the frames that are looked at, with PyAV. Runs in a child process: see `decoder`.

All packets are read first, which decodes nothing and says when each frame is shown. What is wanted is then decoded from
the keyframe before it, and no frame is held that is not wanted."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import av
import numpy as np
import numpy.typing as npt

from millstream.errors import MediaRefused
from millstream.media.container import THREADS, open_closed
from millstream.media.frame_sampling import FrameSampling, chosen

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores")
PACKETS = 400_000
"""Nearly two hours at 60 frames a second."""
LONGEST = 24 * 3600
"""Seconds. A video that says more has a damaged clock."""


@dataclass(frozen=True, slots=True)
class Seen:
    pixels: npt.NDArray[np.uint8]
    second: float


def decode(data: bytes, container: str, pixels: int, pace: FrameSampling) -> list[Seen]:
    """`pixels`: of one frame as it comes, and of all that are kept together. Raises `MediaRefused`."""
    with open_closed(data, container, "video") as film:
        stream = _stream_of(film, pixels)
        packets = _packets_of(film, stream, 2 * len(data))
        return _look(stream, packets, pixels, pace)


def _stream_of(film: InputContainer, pixels: int) -> VideoStream:
    covers = av.stream.Disposition.attached_pic
    streams = [stream for stream in film.streams.video if not stream.disposition & covers]
    if not streams:
        raise MediaRefused("a file of video has no stream of pictures; send one that does")
    stream, codec = streams[0], streams[0].codec_context
    if codec is None or codec.codec.canonical_name not in CODECS:
        name = "a codec that is not known here" if codec is None else codec.codec.canonical_name
        raise MediaRefused(f"a video is coded as {name}; this server reads {', '.join(CODECS)}")
    if codec.width * codec.height > pixels:
        raise MediaRefused(
            f"a video has frames of {codec.width} x {codec.height} = {codec.width * codec.height} pixels; this server "
            f"takes {pixels} (--media-pixels). Send a smaller one"
        )
    codec.thread_type, codec.thread_count = "AUTO", THREADS
    # A stream may change its size on the way. Decoders count what they add at the edges as well: hence more.
    codec.options = {"max_pixels": str(2 * pixels + 2**20)}
    return stream


def _packets_of(film: InputContainer, stream: VideoStream, room: int) -> list[Packet[VideoStream]]:
    """In the order in which they are decoded. A table may name the same bytes a million times: hence `room`."""
    packets: list[Packet[VideoStream]] = []
    for packet in film.demux(stream):
        room -= packet.size
        if len(packets) == PACKETS or room < 0:
            raise MediaRefused(f"a video has more frames than {PACKETS}, or than its bytes can hold")
        if packet.size:
            packets.append(packet)
    return packets


def _look(stream: VideoStream, packets: list[Packet[VideoStream]], pixels: int, pace: FrameSampling) -> list[Seen]:
    times = _times_of(packets)
    base = float(stream.time_base or 0)
    if (times[-1] - times[0]) * base > LONGEST:
        raise MediaRefused(f"a video lasts longer than {LONGEST // 3600} hours, or its clock is damaged")
    ends = [(time - times[0]) * base for time in times[1:]]
    wanted = [times[number] for number in chosen(ends, pace)]
    player, seen, last = _Player(stream, packets), [], None
    for time in wanted:
        frame = player.frame_from(time)
        if frame is None or frame.pts is None:
            break
        if frame.pts != last:
            seen.append(Seen(_pixels_of(frame, pixels // len(wanted)), (frame.pts - times[0]) * base))
        last = frame.pts
    if not seen:
        raise MediaRefused("a video has no frame that can be decoded")
    return seen


def _times_of(packets: list[Packet[VideoStream]]) -> list[int]:
    """When each frame is shown, in order, and when the last one ends."""
    shown = {packet.pts: packet for packet in packets if packet.pts is not None and not packet.is_discard}
    if not shown:
        raise MediaRefused("a video has no frames")
    times = sorted(shown)
    usual = (times[-1] - times[0]) // max(1, len(times) - 1)
    return [*times, times[-1] + max(1, shown[times[-1]].duration or usual)]


class _Player:
    """Frames at times that only go forward. Between them it leaps to the keyframe that the next one needs."""

    def __init__(self, stream: VideoStream, packets: list[Packet[VideoStream]]) -> None:
        self._decoder = stream.codec_context
        self._packets = packets
        self._next: int | None = 0
        """The packet to decode next; None when all are."""
        self._out: deque[VideoFrame] = deque()
        keys = [(packet.pts, place) for place, packet in enumerate(packets) if packet.is_keyframe]
        self._keys = sorted((time, place) for time, place in keys if time is not None)

    def frame_from(self, time: int) -> VideoFrame | None:
        """The first that is shown at `time` or after it."""
        self._leap(time)
        while True:
            while self._out:
                shown = self._out[0].pts
                if shown is not None and shown >= time:
                    return self._out[0]
                self._out.popleft()
            if self._next is None:
                return None
            self._feed()

    def _leap(self, time: int) -> None:
        number = bisect_right(self._keys, (time, len(self._packets))) - 1
        if number >= 0 and self._next is not None and self._keys[number][1] > self._next:
            self._decoder.flush_buffers()
            self._out.clear()
            self._next = self._keys[number][1]

    def _feed(self) -> None:
        assert self._next is not None
        if self._next < len(self._packets):
            self._out += self._decoder.decode(self._packets[self._next])
            self._next += 1
        else:
            self._out += self._decoder.decode(None)
            self._next = None


def _pixels_of(frame: VideoFrame, most: int) -> npt.NDArray[np.uint8]:
    """Upright, as RGB, made smaller where it has more than `most` pixels."""
    width, height = frame.width, frame.height
    scale = math.sqrt(most / (width * height))
    if scale < 1:
        width, height = (max(1, int(side * scale)) for side in (width, height))
        turned = frame.reformat(width, height, "rgb24", interpolation="AREA").to_ndarray()
    else:
        turned = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(turned, round(frame.rotation / 90)))
