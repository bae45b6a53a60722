"""Whether two models have the same vocabulary: a draft model's tokens must mean to the target what they mean to it."""

from __future__ import annotations

from millstream.text.tokenizer import Tokenizer

_SHOWN = 3


def different_tokens(target: Tokenizer, draft: Tokenizer) -> str | None:
    """What differs, as a sentence without its end; None if the vocabularies are the same up to the smaller one.

    Special tokens may have other names: versions of a family name their reserved ones differently.
    """
    here, there = target.names, draft.names
    common = here.keys() & there.keys()
    special = {token for token in common if target.is_special(token) and draft.is_special(token)}
    different = sorted(token for token in common - special if here[token] != there[token])
    if not different and len(common) > len(special):
        return None
    examples = ", ".join(f"{token} is {there[token]!r}, not {here[token]!r}" for token in different[:_SHOWN])
    more = f", and {len(different) - _SHOWN} others differ" if len(different) > _SHOWN else ""
    return f"its vocabulary is another one: {examples}{more}" if different else "its vocabulary is another one"
