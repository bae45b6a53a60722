"""eSpeak NG, if it is installed on this machine: phonemes of other languages, by its program.

It is under the GPL, so it is no part of Millstream and is never downloaded: it is run as a program of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from millstream.errors import BadRequest, MillstreamError

SECONDS = 20.0
_PROGRAMS = ("espeak-ng", "espeak")
_KOKORO = (
    ("a^ɪ", "I"), ("a^ʊ", "W"), ("d^ʒ", "ʤ"), ("e^ɪ", "A"), ("t^ʃ", "ʧ"), ("ɔ^ɪ", "Y"), ("o^ʊ", "O"), ("ə^ʊ", "Q"),
    ("ə^l", "ᵊl"), ("ʲ", ""), ("ɚ", "əɹ"), ("r", "ɹ"), ("x", "k"), ("ç", "k"), ("ɬ", "l"), ("\u0329", ""), ("e", "A"),
    ("ʔ", "t"),
)  # fmt: skip
"""From eSpeak's IPA with ties to the symbols that Kokoro knows, for English."""
_OTHERS = (("a^ɪ", "aɪ"), ("a^ʊ", "aʊ"), ("d^ʒ", "ʤ"), ("t^ʃ", "ʧ"), ("t^s", "ʦ"), ("d^z", "ʣ"), ("^", ""))
_TIES = re.compile("[\u0361\u035c]")


def find_espeak() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


def espeak_phonemes(program: str, text: str, language: str) -> str:
    """Kokoro's phonemes of a sentence. Punctuation is kept. Blocks: call it on the pool."""
    parts = re.split(r"([.,!?;:—…]+\s*)", text)
    spoken = [_ipa(program, part, language) if place % 2 == 0 else part for place, part in enumerate(parts)]
    return re.sub(r"\s+", " ", "".join(spoken)).strip()


def _ipa(program: str, text: str, language: str) -> str:
    if not text.strip():
        return text
    try:
        done = subprocess.run(
            [program, "-q", "--ipa=3", "--tie=^", "-v", language, "--stdin"],
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
    ipa = _TIES.sub("^", done.stdout.decode(errors="replace"))
    for theirs, ours in _KOKORO if language.startswith("en") else _OTHERS:
        ipa = ipa.replace(theirs, ours)
    return " ".join(ipa.replace("_", "").replace("^", "").replace("-", "").split())
