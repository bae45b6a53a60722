"""Video decoding in the child process: the right frames, and no more decoding than they need."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import av
import pytest

from millstream.media.frame_sampling import FrameSampling
from millstream.media.video_decoding import _FrameSource, _read_packets, decode
from support.video_files import LOSSLESS, colour, encode_video, pictures


class Counting:
    """A decoder that counts its packets."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fed = 0

    def decode(self, packet: Any) -> Any:
        self.fed += 1
        return self._inner.decode(packet)

    def flush_buffers(self) -> None:
        self._inner.flush_buffers()


@pytest.mark.parametrize("extra", [{}, {"bf": "3", "x264-params": "open-gop=1"}])
def test_it_seeks_over_frames_that_are_not_sampled(extra: dict[str, str]) -> None:
    """200 frames, every tenth a keyframe, and only three are sampled."""
    data = encode_video(pictures(200), g="10", keyint_min="10", sc_threshold="0", **LOSSLESS, **extra)
    with av.open(io.BytesIO(data), "r", "mov") as container:
        stream = container.streams.video[0]
        packets = _read_packets(container, stream, 2 * len(data))
        times = sorted(packet.pts for packet in packets)
        decoder = Counting(stream.codec_context)
        frame_source = _FrameSource(SimpleNamespace(codec_context=decoder), packets)
        for number in (3, 104, 199):
            frame = frame_source.frame_at(times[number])
            assert tuple(frame.to_ndarray(format="rgb24")[3, 3]) == colour(number)
    assert decoder.fed < 70


@pytest.mark.parametrize("max_frames", [1, 2, 7, 40, 64])
@pytest.mark.parametrize("extra", [{"g": "1"}, {"g": "7"}, {"g": "12", "bf": "3", "x264-params": "open-gop=1"}])
def test_every_sampling_gives_the_frames_that_were_encoded(max_frames: int, extra: dict[str, str]) -> None:
    frames = decode(encode_video(pictures(64), **LOSSLESS, **extra), "mov", 10**7, FrameSampling(100, 1, max_frames))
    assert len(frames) == max_frames
    assert [tuple(frame.pixels[4, 4]) for frame in frames] == [colour(round(10 * frame.second)) for frame in frames]


def test_a_codec_with_invisible_frames() -> None:
    data = encode_video(
        pictures(40), "webm", codec="libvpx", **{"auto-alt-ref": "1", "lag-in-frames": "16", "b": "500k"}
    )
    frames = decode(data, "matroska", 10**7, FrameSampling(100, 1, 40))
    assert len(frames) >= 39
    seconds = [frame.second for frame in frames]
    assert seconds == sorted(set(seconds))
