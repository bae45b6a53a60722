"""Video files: sampled frames, refusals, and isolation: nothing in a file reaches beyond the child process."""

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
from support.video_files import LOSSLESS, audio_only, colour, encode_video, pictures

LIMITS = MediaLimits(timeout=60.0)  # generous: the machine may be busy
MP4 = encode_video(pictures(12))
WEBM = encode_video(pictures(12), "webm", codec="libvpx")


def refusal(data: bytes, limits: MediaLimits = LIMITS, sampling: FrameSampling | None = None) -> str:
    with pytest.raises(MediaRefused) as caught:
        open_frames(data, limits, sampling or FrameSampling())
    return caught.value.message


def near(image: Image.Image, number: int) -> bool:
    found = image.getpixel((image.width // 2, image.height // 2))
    assert isinstance(found, tuple)
    return all(abs(one - other) <= 8 for one, other in zip(found, colour(number), strict=True))


@pytest.mark.parametrize(
    "kind, codec",
    [("mp4", "libx264"), ("mp4", "mpeg4"), ("mov", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9")],
)
def test_two_frames_per_second_and_their_times(kind: str, codec: str) -> None:
    video = open_frames(encode_video(pictures(30), kind, codec=codec), LIMITS, FrameSampling())
    assert video.seconds == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert {(image.mode, image.size) for image in video.images} == {("RGB", (32, 24))}
    assert all(near(image, number) for image, number in zip(video.images, range(0, 30, 5), strict=True))


@pytest.mark.parametrize("options", [{}, {"movflags": "+faststart"}, {"movflags": "frag_keyframe+empty_moov"}])
def test_variants_of_mp4(options: dict[str, str]) -> None:
    video = open_frames(encode_video(pictures(30), g="4", **LOSSLESS, **options), LIMITS, FrameSampling(fps=3))
    expected = [0, 3, 6, 10, 13, 16, 20, 23, 26]
    assert [image.getpixel((5, 5)) for image in video.images] == [colour(number) for number in expected]


def test_a_variable_frame_rate() -> None:
    times = [0, 40, 1000, 1900, 2000, 2010, 7000]
    video = open_frames(encode_video(pictures(7), times=times, **LOSSLESS), LIMITS, FrameSampling(fps=1))
    shown = [colour(number) for number in range(7)]
    numbers = [shown.index(image.getpixel((5, 5))) for image in video.images]
    assert video.seconds == pytest.approx([times[number] / 1000 for number in numbers])
    assert numbers[0] == 0 and {2, 5} <= set(numbers)  # the frames shown at 1 s and from 3 s on


def test_no_more_frames_than_the_model_takes() -> None:
    video = open_frames(encode_video(pictures(40)), LIMITS, FrameSampling(fps=10, max_frames=5))
    assert video.seconds == pytest.approx([0.0, 0.8, 1.6, 2.4, 3.2])


def test_many_frames_are_scaled_down() -> None:
    limits = MediaLimits(pixels=20_000, timeout=60)
    video = open_frames(encode_video(pictures(10, (200, 100)), codec="mpeg4"), limits, FrameSampling(min_frames=5))
    assert len(video.images) == 5
    assert sum(image.width * image.height for image in video.images) <= 20_000
    assert {image.size for image in video.images} == {(89, 44)}
    assert all(near(image, 2 * number) for number, image in enumerate(video.images))


def test_rotation_is_applied() -> None:
    """The file declares that its frames, red at the left, are to be rotated clockwise, as phones do."""
    wide = Image.new("RGB", (64, 32), "blue")
    wide.paste((255, 0, 0), (0, 0, 32, 32))
    data = bytearray(encode_video([wide] * 4, **LOSSLESS))
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 32 << 16, 0, 1 << 30)
    image = open_frames(bytes(data), LIMITS, FrameSampling()).images[0]
    assert image.size == (32, 64)
    assert (image.getpixel((16, 5)), image.getpixel((16, 60))) == ((255, 0, 0), (0, 0, 255))


@pytest.mark.parametrize(
    "data",
    [encode_video(pictures(3), title="Muenchen"), encode_video(pictures(3), "webm", codec="libvpx", title="Muenchen")],
)
def test_a_title_in_another_encoding(data: bytes) -> None:
    assert b"Muenchen" in data
    assert open_frames(data.replace(b"Muenchen", b"M\xfcnchen!"), LIMITS, FrameSampling()).images


@pytest.mark.parametrize("playlist", [b"#EXTM3U\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"RIFF"])
def test_unsupported_formats(playlist: bytes) -> None:
    assert "not in a supported video format; send MP4, MOV, WebM or Matroska" in refusal(playlist)


def test_a_playlist_in_disguise() -> None:
    assert "this video is damaged" in refusal(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom#EXTM3U\nfile:///etc/passwd\n")


def test_nothing_else_is_opened_even_by_a_playlist_demuxer(tmp_path: Path) -> None:
    from millstream.media.video_decoding import decode

    (tmp_path / "a.ts").write_bytes(encode_video(pictures(3), "mpegts"))
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", f"{tmp_path}/a.ts", "#EXT-X-ENDLIST", ""]
    with pytest.raises(MediaRefused, match="refers to other files or hosts"):
        decode("\n".join(lines).encode(), "hls", 10_000, FrameSampling())


def test_a_file_without_video() -> None:
    assert "has no video stream" in refusal(audio_only())


def test_an_unsupported_codec() -> None:
    data = encode_video(pictures(3), "mov", codec="qtrle", pixels="rgb24")
    assert "codec qtrle is not supported. Re-encode it as MP4/H.264; supported are h264, hevc" in refusal(data)


def test_frames_that_are_too_large() -> None:
    message = refusal(MP4, MediaLimits(pixels=700, timeout=60))
    assert "frames of 32 x 24 = 768 pixels; this server takes at most 700 (--media-pixels)" in message


@pytest.mark.parametrize("data", [MP4[:40], MP4[: len(MP4) // 2], WEBM[:40], b"\0\0\0\x08moov", b"\x1aE\xdf\xa3"])
def test_truncated_files(data: bytes) -> None:
    assert "video" in refusal(data)


def table(data: bytes, name: bytes, *numbers: int) -> bytes:
    """The file with other numbers after the version field of one of its tables."""
    changed = bytearray(data)
    at = changed.index(name) + 8
    changed[at : at + 4 * len(numbers)] = struct.pack(f">{len(numbers)}I", *numbers)
    return bytes(changed)


@pytest.mark.parametrize("count", [1_000_000, 100_000_000, 0x0FFFFFFF, 0xFFFFFFFF])
def test_a_header_that_declares_too_many_frames(count: int) -> None:
    """All of one byte and in one chunk: an index of them would have gigabytes."""
    began = time.monotonic()
    message = refusal(table(table(MP4, b"stsz", 1, count), b"stsc", 1, 1, count, 1))
    assert any(text in message for text in ("damaged", "more than", "has no frames"))
    assert time.monotonic() - began < 30


def test_an_index_that_lists_the_same_bytes_repeatedly() -> None:
    message = refusal(table(table(MP4, b"stsz", 500, 12), b"stsc", 1, 1, 12, 1) + b"\0" * 100)
    assert "more frame data than the file has bytes" in message or "damaged" in message


def test_damaged_timestamps() -> None:
    assert "longer than 24 hours" in refusal(table(MP4, b"stts", 1, 12, 0x70000000))


def test_decoding_has_a_timeout() -> None:
    began = time.monotonic()
    message = refusal(MP4, MediaLimits(timeout=0.01))
    assert "decoding this video took longer than 0.01 s (--media-timeout)" in message
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "script, words",
    [("kill -SEGV $$", "the decoder was killed by SIGSEGV"), ("echo words >&2; exit 3", "the decoder failed (words)")],
)
def test_a_decoder_that_crashes(script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = tmp_path / "python"
    crash.write_text(f"#!/bin/sh\n{script}\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    assert words in refusal(MP4)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    assert "pip install 'millstream[video]'" in refusal(MP4)


def test_the_server_process_never_imports_pyav() -> None:
    import subprocess

    code = "import sys, millstream.media.preprocessor; print('av' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


damage = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=20)


@given(st.sampled_from([MP4, WEBM]), damage, st.floats(0, 2))
@settings(max_examples=25)
def test_random_damage_gives_frames_or_a_refusal(data: bytes, flips: Any, cut: float) -> None:
    changed = bytearray(data)
    for where, value in flips:
        changed[int(where * (len(data) - 1))] = value
    try:
        video = open_frames(bytes(changed[: int(cut * len(data))]), LIMITS, FrameSampling())
    except MediaRefused as error:
        assert error.message
    else:
        assert 1 <= len(video.images) == len(video.seconds) <= 64
