"""Decodes the sampled frames of a video with PyAV. Runs in the child process only: see `decoder`.

It first reads all packets, which decodes nothing and gives the time of every frame. Then it decodes each sampled frame
from the keyframe before it, and holds no other frame.
"""

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
from millstream.media.container import THREADS, open_isolated
from millstream.media.frame_sampling import FrameSampling, sample_frames

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores")
MAX_PACKETS = 400_000
"""Nearly two hours at 60 frames per second."""
MAX_SECONDS = 24 * 3600
"""A video that claims to be longer has damaged timestamps."""


@dataclass(frozen=True, slots=True)
class DecodedFrame:
    pixels: npt.NDArray[np.uint8]
    second: float


def decode(data: bytes, container: str, max_pixels: int, sampling: FrameSampling) -> list[DecodedFrame]:
    """`max_pixels`: of one frame as it is stored, and of all returned frames together. Raises `MediaRefused`."""
    with open_isolated(data, container, "video") as video:
        stream = _video_stream(video, max_pixels)
        packets = _read_packets(video, stream, 2 * len(data))
        return _decode_frames(stream, packets, max_pixels, sampling)


def _video_stream(video: InputContainer, max_pixels: int) -> VideoStream:
    cover_art = av.stream.Disposition.attached_pic
    streams = [stream for stream in video.streams.video if not stream.disposition & cover_art]
    if not streams:
        raise MediaRefused("the video file has no video stream; send one that has")
    stream, codec = streams[0], streams[0].codec_context
    if codec is None or codec.codec.canonical_name not in CODECS:
        name = "of this video" if codec is None else codec.codec.canonical_name
        raise MediaRefused(
            f"the video codec {name} is not supported. Re-encode it as MP4/H.264; supported are {', '.join(CODECS)}"
        )
    if codec.width * codec.height > max_pixels:
        raise MediaRefused(
            f"the video has frames of {codec.width} x {codec.height} = {codec.width * codec.height} pixels; this "
            f"server takes at most {max_pixels} (--media-pixels). Send a smaller one"
        )
    codec.thread_type, codec.thread_count = "AUTO", THREADS
    # A stream may change its frame size midway. Decoders also count the padding at the edges: hence the margin.
    codec.options = {"max_pixels": str(2 * max_pixels + 2**20)}
    return stream


def _read_packets(video: InputContainer, stream: VideoStream, max_bytes: int) -> list[Packet[VideoStream]]:
    """In decoding order. `max_bytes` bounds their total: an index may list the same bytes a million times."""
    packets: list[Packet[VideoStream]] = []
    for packet in video.demux(stream):
        max_bytes -= packet.size
        if len(packets) == MAX_PACKETS or max_bytes < 0:
            raise MediaRefused(
                f"the video has more than {MAX_PACKETS} frames, or more frame data than the file has bytes"
            )
        if packet.size:
            packets.append(packet)
    return packets


def _decode_frames(
    stream: VideoStream, packets: list[Packet[VideoStream]], max_pixels: int, sampling: FrameSampling
) -> list[DecodedFrame]:
    times = _frame_times(packets)
    time_base = float(stream.time_base or 0)
    if (times[-1] - times[0]) * time_base > MAX_SECONDS:
        raise MediaRefused(f"the video is longer than {MAX_SECONDS // 3600} hours, or its timestamps are damaged")
    end_times = [(time - times[0]) * time_base for time in times[1:]]
    sampled_times = [times[index] for index in sample_frames(end_times, sampling)]
    frame_source, frames, last_pts = _FrameSource(stream, packets), [], None
    for time in sampled_times:
        frame = frame_source.frame_at(time)
        if frame is None or frame.pts is None:
            break
        if frame.pts != last_pts:
            pixels = _rgb_pixels(frame, max_pixels // len(sampled_times))
            frames.append(DecodedFrame(pixels, (frame.pts - times[0]) * time_base))
        last_pts = frame.pts
    if not frames:
        raise MediaRefused("the video has no frame that can be decoded. Re-encode it as MP4/H.264")
    return frames


def _frame_times(packets: list[Packet[VideoStream]]) -> list[int]:
    """The presentation time of each frame, in order, and the end of the last one."""
    shown = {packet.pts: packet for packet in packets if packet.pts is not None and not packet.is_discard}
    if not shown:
        raise MediaRefused("the video has no frames")
    times = sorted(shown)
    mean_duration = (times[-1] - times[0]) // max(1, len(times) - 1)
    return [*times, times[-1] + max(1, shown[times[-1]].duration or mean_duration)]


class _FrameSource:
    """Decodes frames at ascending times. Between them it seeks to the keyframe that the next one needs."""

    def __init__(self, stream: VideoStream, packets: list[Packet[VideoStream]]) -> None:
        self._decoder = stream.codec_context
        self._packets = packets
        self._next: int | None = 0
        """Index of the packet to decode next; None once the decoder is drained."""
        self._decoded: deque[VideoFrame] = deque()
        keyframes = [(packet.pts, index) for index, packet in enumerate(packets) if packet.is_keyframe]
        self._keyframes = sorted((time, index) for time, index in keyframes if time is not None)

    def frame_at(self, time: int) -> VideoFrame | None:
        """The first frame that is shown at `time` or later. Returns None if there is none."""
        self._seek(time)
        while True:
            while self._decoded:
                shown = self._decoded[0].pts
                if shown is not None and shown >= time:
                    return self._decoded[0]
                self._decoded.popleft()
            if self._next is None:
                return None
            self._decode_next()

    def _seek(self, time: int) -> None:
        number = bisect_right(self._keyframes, (time, len(self._packets))) - 1
        if number >= 0 and self._next is not None and self._keyframes[number][1] > self._next:
            self._decoder.flush_buffers()
            self._decoded.clear()
            self._next = self._keyframes[number][1]

    def _decode_next(self) -> None:
        assert self._next is not None
        if self._next < len(self._packets):
            self._decoded += self._decoder.decode(self._packets[self._next])
            self._next += 1
        else:
            self._decoded += self._decoder.decode(None)
            self._next = None


def _rgb_pixels(frame: VideoFrame, max_pixels: int) -> npt.NDArray[np.uint8]:
    """Upright, as RGB, scaled down to `max_pixels`."""
    width, height = frame.width, frame.height
    scale = math.sqrt(max_pixels / (width * height))
    if scale < 1:
        width, height = (max(1, int(side * scale)) for side in (width, height))
        pixels = frame.reformat(width, height, "rgb24", interpolation="AREA").to_ndarray()
    else:
        pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
