"""Decodes a file in a child process. FFmpeg is a million lines of C that read what a stranger wrote: a crash, a hang or
a greedy header ends the child, and the request gets a refusal. The child is waited for on threads for slow hosts."""

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


def in_child(
    order: Mapping[str, object], data: bytes, limits: MediaLimits, what: str, without: str
) -> tuple[dict[str, Any], memoryview]:
    """What `decoder_child` makes of a file: a head and bytes. `without`: what can be read without PyAV, for people.
    Raises `MediaRefused`."""
    if importlib.util.find_spec("av") is None:
        raise MediaRefused(
            f"this server cannot decode this {what}: PyAV is not installed (pip install 'millstream[video]'). {without}"
        )
    whole = {**order, "pixels": limits.pixels, "seconds": limits.seconds}
    command = sandbox.command("millstream.media.decoder_child", json.dumps(whole))
    try:
        child = subprocess.run(
            command, input=data, capture_output=True, timeout=limits.seconds, check=False, env=sandbox.environment()
        )
    except subprocess.TimeoutExpired as error:
        raise MediaRefused(
            f"a {what} took longer than {limits.seconds:g} s to decode (--media-timeout). Send a shorter or smaller one"
        ) from error
    if child.returncode:
        raise MediaRefused(f"a {what} cannot be decoded: {_end_of(child)}. Write it anew, in a usual format")
    end = child.stdout.index(b"\n")
    said: dict[str, Any] = json.loads(child.stdout[:end])
    if "refused" in said:
        raise MediaRefused(said["refused"])
    return said, memoryview(child.stdout)[end + 1 :]


def _end_of(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"its decoder was ended by {signal.Signals(-child.returncode).name}"
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    return f"its decoder failed ({lines[-1][:200] if lines else child.returncode})"
