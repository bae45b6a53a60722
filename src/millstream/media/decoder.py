"""Decodes a video or compressed audio file in a child process.

FFmpeg is a million lines of C that parse untrusted input: a crash, a hang or a header that asks for too much memory
ends the child, and the request is refused. Callers run on the network threads: they block until the child ends.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from millstream import sandbox
from millstream.errors import MediaRefused
from millstream.media.limits import MediaLimits

REENCODE = {"video": "Re-encode it as MP4/H.264", "audio": "Re-encode it as WAV or MP3"}


def in_child(
    job: Mapping[str, object], data: bytes, limits: MediaLimits, label: str, alternative: str
) -> tuple[dict[str, Any], memoryview]:
    """Run `decoder_child` on a file. Returns its JSON header and the bytes that follow. `label` names the file in
    errors; `alternative` says which formats need no PyAV. Raises `MediaRefused`."""
    check_pyav(label, alternative)
    argument = json.dumps({**job, "pixels": limits.pixels, "seconds": limits.timeout})
    command = sandbox.command("millstream.media.decoder_child", argument)
    try:
        child = subprocess.run(
            command, input=data, capture_output=True, timeout=limits.timeout, check=False, env=sandbox.environment()
        )
    except subprocess.TimeoutExpired as error:
        raise too_slow(label, limits) from error
    if child.returncode:
        raise decoding_failed(label, str(job["kind"]), child.returncode, child.stderr)
    end = child.stdout.index(b"\n")
    header: dict[str, Any] = json.loads(child.stdout[:end])
    if "refused" in header:
        raise MediaRefused(header["refused"])
    return header, memoryview(child.stdout)[end + 1 :]


def check_pyav(label: str, alternative: str, extra: str = "video") -> None:
    if importlib.util.find_spec("av") is None:
        raise MediaRefused(
            f"this server cannot decode this {label}: PyAV is not installed (pip install 'millstream[{extra}]'). "
            f"{alternative}"
        )


def too_slow(label: str, limits: MediaLimits) -> MediaRefused:
    return MediaRefused(
        f"decoding this {label} took longer than {limits.timeout:g} s (--media-timeout). Send a shorter or smaller one"
    )


def decoding_failed(label: str, kind: str, code: int, errors: bytes) -> MediaRefused:
    """The child crashed: `code` is its exit status, `errors` what it wrote to stderr."""
    return MediaRefused(f"this {label} cannot be decoded: {_failure(code, errors)}. {REENCODE[kind]}")


def _failure(code: int, errors: bytes) -> str:
    if code < 0:
        return f"the decoder was killed by {signal.Signals(-code).name}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"the decoder failed ({lines[-1][:200] if lines else code})"
