"""Files of video: which frames are seen, what is refused, and that nothing in a file reaches further than its child."""

from __future__ import annotations

import importlib.util
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from millstream.errors import MediaRefused
from millstream.media.frame_sampling import FrameSampling
from millstream.media.frames import open_frames
from millstream.media.limits import MediaLimits
from support.films import LOSSLESS, colour, film, pictures, sound

LIMITS = MediaLimits(seconds=60.0)  # a busy machine is not what is tested
MP4 = film(pictures(12))
WEBM = film(pictures(12), "webm", codec="libvpx")


def refusal(data: bytes, limits: MediaLimits = LIMITS, pace: FrameSampling | None = None) -> str:
    with pytest.raises(MediaRefused) as caught:
        open_frames(data, limits, pace or FrameSampling())
    return caught.value.message


def near(image: Image.Image, number: int) -> bool:
    found = image.getpixel((image.width // 2, image.height // 2))
    assert isinstance(found, tuple)
    return all(abs(one - other) <= 8 for one, other in zip(found, colour(number), strict=True))


@pytest.mark.parametrize(
    "kind, codec",
    [("mp4", "libx264"), ("mp4", "mpeg4"), ("mov", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9")],
)
def test_two_frames_a_second_and_their_times(kind: str, codec: str) -> None:
    video = open_frames(film(pictures(30), kind, codec=codec), LIMITS, FrameSampling())
    assert video.seconds == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert {(image.mode, image.size) for image in video.images} == {("RGB", (32, 24))}
    assert all(near(image, number) for image, number in zip(video.images, range(0, 30, 5), strict=True))


@pytest.mark.parametrize("options", [{}, {"movflags": "+faststart"}, {"movflags": "frag_keyframe+empty_moov"}])
def test_forms_of_mp4(options: dict[str, str]) -> None:
    video = open_frames(film(pictures(30), g="4", **LOSSLESS, **options), LIMITS, FrameSampling(a_second=3))
    expected = [0, 3, 6, 10, 13, 16, 20, 23, 26]
    assert [image.getpixel((5, 5)) for image in video.images] == [colour(number) for number in expected]


def test_frames_that_come_at_odd_times() -> None:
    times = [0, 40, 1000, 1900, 2000, 2010, 7000]
    video = open_frames(film(pictures(7), times=times, **LOSSLESS), LIMITS, FrameSampling(a_second=1))
    shown = [colour(number) for number in range(7)]
    numbers = [shown.index(image.getpixel((5, 5))) for image in video.images]
    assert video.seconds == pytest.approx([times[number] / 1000 for number in numbers])
    assert numbers[0] == 0 and {2, 5} <= set(numbers)  # what is shown at 1 s; and from 3 s on


def test_no_more_frames_than_the_model_takes() -> None:
    video = open_frames(film(pictures(40)), LIMITS, FrameSampling(a_second=10, most=5))
    assert video.seconds == pytest.approx([0.0, 0.8, 1.6, 2.4, 3.2])


def test_frames_that_are_many_are_kept_small() -> None:
    limits = MediaLimits(pixels=20_000, seconds=60)
    video = open_frames(film(pictures(10, (200, 100)), codec="mpeg4"), limits, FrameSampling(fewest=5))
    assert len(video.images) == 5
    assert sum(image.width * image.height for image in video.images) <= 20_000
    assert {image.size for image in video.images} == {(89, 44)}
    assert all(near(image, 2 * number) for number, image in enumerate(video.images))


def test_a_phone_that_was_held_upright() -> None:
    """The file says that its pictures, red at the left, are to be turned clockwise."""
    wide = Image.new("RGB", (64, 32), "blue")
    wide.paste((255, 0, 0), (0, 0, 32, 32))
    data = bytearray(film([wide] * 4, **LOSSLESS))
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 32 << 16, 0, 1 << 30)
    image = open_frames(bytes(data), LIMITS, FrameSampling()).images[0]
    assert image.size == (32, 64)
    assert (image.getpixel((16, 5)), image.getpixel((16, 60))) == ((255, 0, 0), (0, 0, 255))


@pytest.mark.parametrize(
    "data", [film(pictures(3), title="Muenchen"), film(pictures(3), "webm", codec="libvpx", title="Muenchen")]
)
def test_a_title_in_another_encoding(data: bytes) -> None:
    assert b"Muenchen" in data
    assert open_frames(data.replace(b"Muenchen", b"M\xfcnchen!"), LIMITS, FrameSampling()).images


@pytest.mark.parametrize("playlist", [b"#EXTM3U\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"RIFF"])
def test_what_is_not_a_kind_that_is_read(playlist: bytes) -> None:
    assert "videos are read as MP4, MOV, WebM or Matroska" in refusal(playlist)


def test_a_playlist_in_disguise() -> None:
    assert "this video is damaged" in refusal(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom#EXTM3U\nfile:///etc/passwd\n")


def test_nothing_else_is_opened_even_by_a_reader_of_playlists(tmp_path: Path) -> None:
    from millstream.media.video_decoding import decode

    (tmp_path / "a.ts").write_bytes(film(pictures(3), "mpegts"))
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", f"{tmp_path}/a.ts", "#EXT-X-ENDLIST", ""]
    with pytest.raises(MediaRefused, match="refers to other files or hosts"):
        decode("\n".join(lines).encode(), "hls", 10_000, FrameSampling())


def test_sound_alone() -> None:
    assert "has no stream of pictures" in refusal(sound())


def test_a_codec_that_is_not_read() -> None:
    data = film(pictures(3), "mov", codec="qtrle", pixels="rgb24")
    assert "coded as qtrle; this server reads h264, hevc" in refusal(data)


def test_frames_that_are_too_large() -> None:
    words = refusal(MP4, MediaLimits(pixels=700, seconds=60))
    assert "frames of 32 x 24 = 768 pixels; this server takes 700 (--media-pixels)" in words


@pytest.mark.parametrize("data", [MP4[:40], MP4[: len(MP4) // 2], WEBM[:40], b"\0\0\0\x08moov", b"\x1aE\xdf\xa3"])
def test_files_that_were_cut(data: bytes) -> None:
    assert "video" in refusal(data)


def table(data: bytes, name: bytes, *numbers: int) -> bytes:
    """The file with other numbers after the version of one of its tables."""
    changed = bytearray(data)
    at = changed.index(name) + 8
    changed[at : at + 4 * len(numbers)] = struct.pack(f">{len(numbers)}I", *numbers)
    return bytes(changed)


@pytest.mark.parametrize("count", [1_000_000, 100_000_000, 0x0FFFFFFF, 0xFFFFFFFF])
def test_a_header_that_promises_frames_without_end(count: int) -> None:
    """All of them one byte and in one chunk: a table of them would have gigabytes."""
    began = time.monotonic()
    words = refusal(table(table(MP4, b"stsz", 1, count), b"stsc", 1, 1, count, 1))
    assert any(said in words for said in ("damaged", "more frames than", "has no frames"))
    assert time.monotonic() - began < 30


def test_a_table_that_names_the_same_bytes_again_and_again() -> None:
    words = refusal(table(table(MP4, b"stsz", 500, 12), b"stsc", 1, 1, 12, 1) + b"\0" * 100)
    assert "than its bytes can hold" in words or "damaged" in words


def test_a_clock_that_is_damaged() -> None:
    assert "longer than 24 hours" in refusal(table(MP4, b"stts", 1, 12, 0x70000000))


def test_time_is_bounded() -> None:
    began = time.monotonic()
    words = refusal(MP4, MediaLimits(seconds=0.01))
    assert "a video took longer than 0.01 s to decode (--media-timeout)" in words
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "script, words",
    [("kill -SEGV $$", "its decoder was ended by SIGSEGV"), ("echo words >&2; exit 3", "its decoder failed (words)")],
)
def test_a_decoder_that_crashes(script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = tmp_path / "python"
    crash.write_text(f"#!/bin/sh\n{script}\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    assert words in refusal(MP4)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    assert "pip install 'millstream[video]'" in refusal(MP4)


def test_the_server_itself_never_imports_the_decoder() -> None:
    import subprocess

    code = "import sys, millstream.media.preprocessor; print('av' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


damage = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=20)


@given(st.sampled_from([MP4, WEBM]), damage, st.floats(0, 2))
@settings(max_examples=25)
def test_damage_of_any_kind_gives_frames_or_a_refusal(data: bytes, flips: Any, cut: float) -> None:
    changed = bytearray(data)
    for where, value in flips:
        changed[int(where * (len(data) - 1))] = value
    try:
        video = open_frames(bytes(changed[: int(cut * len(data))]), LIMITS, FrameSampling())
    except MediaRefused as error:
        assert error.message
    else:
        assert 1 <= len(video.images) == len(video.seconds) <= 64
