"""Parameters of a request: which ones are served, which ones are ignored, and which ones are refused.

A parameter that cannot change what is generated here is ignored, and a debug log line names it. One that would change
it, and is not served, is an error: ignoring it would be a wrong result with status 200. Many clients send every field
with its neutral value, and those must work.

A name that nobody knows cannot be judged. It is ignored as well, as other servers do, unless it resembles one that is
served: then it is most likely a typo.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence

from millstream.errors import UnknownParameter, UnsupportedParameter

log = logging.getLogger(__name__)

Neutrals = Mapping[str, tuple[object, ...]]
"""Names of parameters that are not supported, each with the values, besides null, that have no effect."""

MAX_QUOTED = 64
"""Characters of an unknown name that an error or a log line quotes. Names of ours are shorter."""
MAX_LOGGED = 32
"""Ignored parameters that one log line names."""
MAX_COMPARED = 64
"""Unknown names that are compared with known ones: it takes time, and a client may send thousands."""
MAX_UNKNOWN = 1_000
"""Names that nobody knows, in one request. No client has so many."""
RESEMBLES = 0.8
"""From this similarity on, an unknown name counts as a misspelled one."""


def supported(
    values: Mapping[str, object],
    known: Collection[str],
    unsupported: Neutrals,
    ignored: Collection[str] = (),
    *,
    prefix: str = "",
) -> dict[str, object]:
    """Like `split_parameters`, and logs what is ignored."""
    served, left_out = split_parameters(values, known, unsupported, ignored, prefix=prefix)
    log_ignored(left_out)
    return served


def split_parameters(
    values: Mapping[str, object],
    known: Collection[str],
    unsupported: Neutrals,
    ignored: Collection[str] = (),
    *,
    prefix: str = "",
) -> tuple[dict[str, object], list[str]]:
    """Returns the supported parameters, and the names of those that are ignored. Null means "not given", as in OpenAI's
    API, so nulls are left out of both. Raises if a parameter is unsupported and not neutral, or is misspelled."""
    served: dict[str, object] = {}
    left_out: list[str] = []
    unknown = 0
    for name, value in values.items():
        if name in known:
            if value is not None:
                served[name] = value
        elif name in unsupported:
            if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
                raise UnsupportedParameter(f"{prefix}{name} is not supported by this server.", param=prefix + name)
        else:
            if name not in ignored:
                unknown += 1
                _refuse_unknown(name, unknown, known, prefix)
            if value is not None:
                left_out.append(prefix + name)
    return served, left_out


def _refuse_unknown(name: str, count: int, known: Collection[str], prefix: str) -> None:
    """`count`: how many unknown names there are so far, this one among them."""
    if count > MAX_UNKNOWN:
        raise UnknownParameter(
            f"The request has more than {MAX_UNKNOWN} parameters that this API does not know, such as "
            f"{prefix}{ascii(name[:MAX_QUOTED])[1:-1]}.",
            param=(prefix + name)[:MAX_QUOTED],
        )
    if count <= MAX_COMPARED:
        _refuse_typo(name, known, prefix)


def log_ignored(names: Sequence[str]) -> None:
    """Writes one debug line for a request, if it has parameters that are ignored."""
    if names and log.isEnabledFor(logging.DEBUG):
        shown = ", ".join(ascii(name[:MAX_QUOTED])[1:-1] for name in names[:MAX_LOGGED])
        more = f" and {len(names) - MAX_LOGGED} more" if len(names) > MAX_LOGGED else ""
        log.debug("Ignored parameters, which have no effect here: %s%s", shown, more)


def _same(value: object, neutral: object) -> bool:
    """Equality as in JSON: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse_typo(name: str, known: Collection[str], prefix: str) -> None:
    """Raises `UnknownParameter` if the name resembles a known one."""
    if len(name) > MAX_QUOTED:  # comparing takes time that grows with the length, and no name of ours is that long
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=RESEMBLES)
    if close:
        raise UnknownParameter(
            f"{prefix}{name} is not a parameter of this endpoint. Did you mean {prefix}{close[0]}?",
            param=prefix + name,
        )
