"""Names of voices in requests: one voice, a mix such as `af_bella+af_sky` or `af_bella(2)+af_sky(1)`, or OpenAI's."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from millstream.errors import BadRequest
from millstream.models.nearby import did_you_mean

MAX_VOICES = 8
"""Of a mix."""
_PART = re.compile(r"\s*([\w.-]+)\s*(?:\(\s*(\d+(?:\.\d+)?)\s*\))?\s*")

Mix = tuple[tuple[str, float], ...]


def parse_mix(text: str, known: Collection[str], aliases: Mapping[str, str]) -> Mix:
    """Voices with their shares. Raises `BadRequest`, with names like it, for a voice that there is not."""
    mix = []
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        if match is None:
            raise BadRequest(
                f"the voice {text!r:.120} cannot be read. Write a name, or a mix such as af_bella(2)+af_sky(1).",
                param="voice",
            )
        share = float(match[2] or 1)
        if not (math.isfinite(share) and 0 < share <= 100):
            raise BadRequest(f"the share of {match[1]!r:.60} in voice must be above 0 and at most 100", param="voice")
        mix.append((_known(match[1], known, aliases), share))
    if len(mix) > MAX_VOICES:
        raise BadRequest(f"voice mixes {len(mix)} voices; at most {MAX_VOICES} can be mixed", param="voice")
    return tuple(mix)


def _known(name: str, known: Collection[str], aliases: Mapping[str, str]) -> str:
    if name in known:
        return name
    lower = {each.lower(): each for each in known}
    if name.lower() in lower:
        return lower[name.lower()]
    if (alias := aliases.get(name.lower())) is not None:
        return alias if alias in known else sorted(known)[0]
    names: Sequence[str] = sorted(known)
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    raise BadRequest(
        f"there is no voice {name!r:.60}.{did_you_mean(name, [*names, *aliases])} Voices: {listed}. "
        "GET /v1/audio/voices lists all of them.",
        param="voice",
    )
