"""Refuses token ids that a model has no embedding for, before they enter its engine.

A tokenizer may have more tokens than its model has embeddings, and MLX does not check: it reads whatever lies in memory
beyond the table. Far enough out, that crashes the process. Every kind of engine that takes ids asks here, with the
number of rows of the table that was really loaded, which the engine reports with its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from millstream.errors import BadRequest


def check_token_ids(
    tokens: Sequence[int],
    rows: int,
    *,
    where: str,
    name: Callable[[int], str | None] = lambda token: None,
    exempt: Collection[int] = (),
    param: str | None = None,
    hint: str = "",
) -> None:
    """Raises `BadRequest` for the first token without an embedding. `name` gives a token's text; `exempt` are tokens
    whose embeddings are replaced; `hint` is one more sentence for the client."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < rows):
        return
    outside = next((token for token in tokens if not 0 <= token < rows and token not in exempt), None)
    if outside is None:
        return
    found = name(outside) if 0 <= outside < 2**32 else None
    token = f"token {outside}" if found is None else f"{found!r:.60}, token {outside}"
    raise BadRequest(
        f"{where} has {token}, which this model has no embedding for: its token ids are 0 to {rows - 1}."
        f"{' ' if hint else ''}{hint}",
        param=param,
    )
