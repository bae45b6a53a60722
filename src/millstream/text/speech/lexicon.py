"""The pronouncing dictionary: CMUdict, packed by `scripts/pack_cmudict.py`. See `data/CMUDICT-LICENSE`."""

from __future__ import annotations

import functools
import lzma
from importlib import resources

FILE = "cmudict.xz"

OWN = {
    "millstream": "mI1lstri2m", "mlx": "E2mE2lE1ks", "github": "gI1th^2b", "openai": "o2p^neY1",
    "chatgpt": "C@2tjipiti1",
    "json": "je1s^n", "yaml": "y@1m^l", "linux": "lI1n^ks", "macos": "m@1koE2s", "ios": "Y2oE1s", "wifi": "wY1fY2",
    "app": "@1p", "apps": "@1ps", "blog": "blA1g", "email": "i1me2l", "emails": "i1me2lz", "online": "A1nlY1n",
    "website": "wE1bsY2t", "websites": "wE1bsY2ts", "smartphone": "smA1rtfo2n", "podcast": "pA1dk@2st",
    "emoji": "imo1ji", "wikipedia": "wI2kipi1di^", "kokoro": "kO1k^ro", "google": "gu1g^l",
    "thirty": "TR1ti", "kilometer": "kIlA1m^tR", "kilometers": "kIlA1m^tRz", "strasse": "StrA1s^",
    "ok": "o2ke1", "okay": "o2ke1", "hmm": "h^m", "yeah": "y@1", "uh": "^1", "um": "^1m", "lol": "lA1l",
    "api": "e2piY1",
    "cpu": "si2piyu1", "gpu": "ji2piyu1", "ai": "e2Y1", "url": "yu2ArE1l", "http": "e2Ctitipi1",
}  # fmt: skip
"""Words that came after the dictionary."""


@functools.cache
def dictionary() -> dict[str, str]:
    """Words in lower case to codes. Read once per process; some 100 ms."""
    packed = resources.files("millstream.text.speech").joinpath("data", FILE).read_bytes()
    words: dict[str, str] = {}
    word = ""
    for line in lzma.decompress(packed).decode("ascii").splitlines():
        # Each line has the number of letters that the word shares with the one before, as a letter.
        word = word[: ord(line[0]) - 48] + line[1 : (place := line.index(" "))]
        words[word] = line[place + 1 :]
    return words | OWN
