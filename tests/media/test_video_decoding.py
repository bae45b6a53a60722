"""Inside the child: what is decoded, and that it is no more than is needed."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import av
import pytest

from millstream.media.frame_sampling import FrameSampling
from millstream.media.video_decoding import _packets_of, _Player, decode
from support.films import LOSSLESS, colour, film, pictures


class Counting:
    """A decoder that counts what it is given."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fed = 0

    def decode(self, packet: Any) -> Any:
        self.fed += 1
        return self._inner.decode(packet)

    def flush_buffers(self) -> None:
        self._inner.flush_buffers()


@pytest.mark.parametrize("extra", [{}, {"bf": "3", "x264-params": "open-gop=1"}])
def test_it_leaps_over_what_nobody_wants(extra: dict[str, str]) -> None:
    """200 frames, a keyframe in every ten, and only three are wanted."""
    data = film(pictures(200), g="10", keyint_min="10", sc_threshold="0", **LOSSLESS, **extra)
    with av.open(io.BytesIO(data), "r", "mov") as container:
        stream = container.streams.video[0]
        packets = _packets_of(container, stream, 2 * len(data))
        times = sorted(packet.pts for packet in packets)
        decoder = Counting(stream.codec_context)
        player = _Player(SimpleNamespace(codec_context=decoder), packets)
        for number in (3, 104, 199):
            frame = player.frame_from(times[number])
            assert tuple(frame.to_ndarray(format="rgb24")[3, 3]) == colour(number)
    assert decoder.fed < 70


@pytest.mark.parametrize("most", [1, 2, 7, 40, 64])
@pytest.mark.parametrize("extra", [{"g": "1"}, {"g": "7"}, {"g": "12", "bf": "3", "x264-params": "open-gop=1"}])
def test_every_choice_gives_the_frames_that_were_drawn(most: int, extra: dict[str, str]) -> None:
    seen = decode(film(pictures(64), **LOSSLESS, **extra), "mov", 10**7, FrameSampling(100, 1, most))
    assert len(seen) == most
    assert [tuple(each.pixels[4, 4]) for each in seen] == [colour(round(10 * each.second)) for each in seen]


def test_a_codec_whose_hidden_frames_are_packets_too() -> None:
    data = film(pictures(40), "webm", codec="libvpx", **{"auto-alt-ref": "1", "lag-in-frames": "16", "b": "500k"})
    seen = decode(data, "matroska", 10**7, FrameSampling(100, 1, 40))
    assert len(seen) >= 39
    seconds = [each.second for each in seen]
    assert seconds == sorted(set(seconds))
