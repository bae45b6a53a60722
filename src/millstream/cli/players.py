"""Plays speech with a program that is on this machine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.media.audio_encoding import PCM_RATE
from millstream.media.pcm import wav_header

_STREAMING: tuple[tuple[str, ...], ...] = (
    ("paplay", "--raw", "--format=s16le", f"--rate={PCM_RATE}", "--channels=1"),
    ("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-r", str(PCM_RATE), "-c", "1"),
    ("ffplay", "-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(PCM_RATE), "-i", "-"),
    ("play", "-q", "-t", "raw", "-r", str(PCM_RATE), "-e", "signed", "-b", "16", "-c", "1", "-"),
)
"""Players that take raw samples on their standard input, so sound begins with the first sentence."""
_FILES: tuple[tuple[str, ...], ...] = (("afplay",),)
"""Players that want a file."""


def play(samples: Iterable[bytes]) -> int:
    """`samples`: as the format `pcm` has them. Returns the exit code. Raises if there is no player."""
    for command in _STREAMING:
        if found := shutil.which(command[0]):
            return _play_stream([found, *command[1:]], samples)
    for command in _FILES:
        if found := shutil.which(command[0]):
            return _play_file([found, *command[1:]], samples)
    names = ", ".join(command[0] for command in (*_STREAMING, *_FILES))
    raise MillstreamError(f"No player was found ({names}). Write to a file instead: -o speech.wav")


def _play_stream(command: list[str], samples: Iterable[bytes]) -> int:
    player: subprocess.Popen[bytes] | None = None
    try:
        for piece in samples:
            # Not before the server has answered: an error needs no player.
            player = player or subprocess.Popen(command, stdin=subprocess.PIPE)
            assert player.stdin is not None
            player.stdin.write(piece)
            player.stdin.flush()
    except BrokenPipeError:
        assert player is not None
        raise MillstreamError(f"{command[0]} ended with code {player.wait()}. Write to a file: -o speech.wav") from None
    finally:
        if player is not None and player.stdin is not None:
            _close(player)
    return 0 if player is None else player.wait()


def _close(player: subprocess.Popen[bytes]) -> None:
    assert player.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its exit code says why
        player.stdin.close()


def _play_file(command: list[str], samples: Iterable[bytes]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "speech.wav")
        body = b"".join(samples)
        path.write_bytes(wav_header(PCM_RATE, len(body)) + body)
        return subprocess.run([*command, str(path)], check=False).returncode
