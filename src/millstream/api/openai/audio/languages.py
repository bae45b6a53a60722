"""Codes and English names of languages: requests have either, and a verbose transcript has the name, as OpenAI's."""

from __future__ import annotations

import re

from millstream.errors import BadRequest

_NAMES = (
    "af afrikaans, am amharic, ar arabic, as assamese, az azerbaijani, ba bashkir, be belarusian, bg bulgarian, "
    "bn bengali, bo tibetan, br breton, bs bosnian, ca catalan, cs czech, cy welsh, da danish, de german, el greek, "
    "en english, es spanish, et estonian, eu basque, fa persian, fi finnish, fo faroese, fr french, gl galician, "
    "gu gujarati, ha hausa, haw hawaiian, he hebrew, hi hindi, hr croatian, ht haitian creole, hu hungarian, "
    "hy armenian, id indonesian, is icelandic, it italian, ja japanese, jw javanese, ka georgian, kk kazakh, km khmer, "
    "kn kannada, ko korean, la latin, lb luxembourgish, ln lingala, lo lao, lt lithuanian, lv latvian, mg malagasy, "
    "mi maori, mk macedonian, ml malayalam, mn mongolian, mr marathi, ms malay, mt maltese, my myanmar, ne nepali, "
    "nl dutch, nn nynorsk, no norwegian, oc occitan, pa punjabi, pl polish, ps pashto, pt portuguese, ro romanian, "
    "ru russian, sa sanskrit, sd sindhi, si sinhala, sk slovak, sl slovenian, sn shona, so somali, sq albanian, "
    "sr serbian, su sundanese, sv swedish, sw swahili, ta tamil, te telugu, tg tajik, th thai, tk turkmen, tl tagalog, "
    "tr turkish, tt tatar, uk ukrainian, ur urdu, uz uzbek, vi vietnamese, yi yiddish, yo yoruba, yue cantonese, "
    "zh chinese"
)
NAMES: dict[str, str] = {code: name for code, _, name in (entry.partition(" ") for entry in _NAMES.split(", "))}
_CODES = {name: code for code, name in NAMES.items()} | {"burmese": "my", "mandarin": "zh", "valencian": "ca"}
_TAG = re.compile(r"([a-z]{2,3})([-_][a-z0-9]+)*")


def language_code(text: str) -> str:
    """The code in `en`, `en-US` or `English`. Raises `BadRequest`; whether the model knows it is not checked here."""
    lowered = text.strip().lower()
    if lowered in _CODES:
        return _CODES[lowered]
    if match := _TAG.fullmatch(lowered):
        return match[1]
    raise BadRequest(
        f"language must be a code of two or three letters, such as en or de, but {text[:60]!r} was sent.",
        param="language",
    )


def language_name(code: str) -> str:
    """The code itself if its name is not known."""
    return NAMES.get(code, code)
