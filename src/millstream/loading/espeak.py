"""Runs eSpeak NG, if it is installed on this machine.

It is under the GPL, so it is no part of Millstream and is never downloaded: it is run as a program of its own.
"""

from __future__ import annotations

import functools
import shutil
import subprocess

from millstream.errors import BadRequest, MillstreamError
from millstream.text.speech.espeak import RunEspeak

SECONDS = 20.0
_PROGRAMS = ("espeak-ng", "espeak")


def find_espeak() -> RunEspeak | None:
    """What runs it; None if it is not installed."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    return None if program is None else functools.partial(run_espeak, program)


def run_espeak(program: str, text: str, language: str) -> str:
    """The IPA of a text, with `^` between letters that are one sound. Blocks: call it on the pool."""
    try:
        done = subprocess.run(
            [program, "-q", "--ipa", "--tie=^", "-v", language, "--stdin"],
            input=text.encode(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MillstreamError(f"eSpeak NG cannot be run: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()[:200]
        raise BadRequest(f"eSpeak NG cannot speak the language {language!r:.40}: {reason}", param="language")
    return done.stdout.decode(errors="replace")
