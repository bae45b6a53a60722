"""Words for how much a model should reason, as clients of all dialects send them."""

from __future__ import annotations

from millstream.errors import BadRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SYNONYMS = {"off": "none", "disabled": "none", "auto": None, "default": None, "normal": "medium", "maximum": "max"}


def parse_effort(value: object, param: str) -> str | None:
    """Returns one of `EFFORTS`, or None for the model's default. Raises `BadRequest` if the word is unknown."""
    if isinstance(value, str):
        word = value.strip().lower().replace("-", "").replace("extrahigh", "xhigh")
        if word in EFFORTS:
            return word
        if word in _SYNONYMS:
            return _SYNONYMS[word]
    raise BadRequest(f"{param} must be one of {', '.join(EFFORTS)}.", param=param)
