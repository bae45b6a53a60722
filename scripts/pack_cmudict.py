"""Packs CMUdict (cmudict.dict) into the file that the text-to-phoneme code reads.

    python scripts/pack_cmudict.py cmudict.dict src/millstream/text/speech/data/cmudict.xz

The first pronunciation of each word is taken. Words with digits or points are left out: the normalisation speaks those.
"""

from __future__ import annotations

import lzma
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from millstream.text.speech.arpabet import encode


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    words: dict[str, str] = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        word, *phones = line.partition("#")[0].split()
        if re.fullmatch(r"[a-z][a-z']*|'[a-z]+", word):
            words.setdefault(word, encode(phones))
    lines, before = [], ""
    for word in sorted(words):
        shared = 0
        while shared < min(len(word), len(before), 40) and word[shared] == before[shared]:
            shared += 1
        lines.append(f"{chr(48 + shared)}{word[shared:]} {words[word]}\n")
        before = word
    packed = lzma.compress("".join(lines).encode("ascii"), preset=9 | lzma.PRESET_EXTREME)
    target.write_bytes(packed)
    print(f"{len(words)} words, {len(packed)} bytes")


if __name__ == "__main__":
    main()
