"""Where media stand in a prompt: the template's markers become the tokens that the processor asks for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from millstream.errors import BadRequest
from millstream.media.port import Mark, Prepared
from millstream.types import Kind, Media, Tensor

Marks = Mapping[Kind, Mark]


def expand(text: str, marks: Marks, media: Sequence[Prepared]) -> str:
    """The rendered prompt with each marker replaced by what its image or video needs."""
    names = {mark.text: kind for kind, mark in marks.items()}
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    found = [names[marker] for marker in pieces[1::2]]
    if found != [each.kind for each in media]:
        raise BadRequest(
            f"the prompt has places for {len(found)} media and the request has {len(media)}, or in another order. "
            f"Leave {' and '.join(map(repr, names))} out of texts: the model's template writes them",
            param="messages",
        )
    pieces[1::2] = [each.text for each in media]
    return "".join(pieces)


def placed(tokens: Sequence[int], marks: Marks, media: Sequence[Prepared]) -> tuple[Media, ...]:
    """The media with their places among the tokens of the expanded prompt."""
    line = np.asarray(tokens)
    places = {kind: np.flatnonzero(line == mark.token_id) for kind, mark in marks.items()}
    for kind, found in places.items():
        wanted = sum(each.places for each in media if each.kind == kind)
        if len(found) != wanted:
            raise BadRequest(
                f"the prompt has {len(found)} of the model's own {kind} tokens where {wanted} are needed. Leave the "
                "names of special tokens out of texts",
                param="messages",
            )
    made = []
    for each in media:
        own, places[each.kind] = np.split(places[each.kind], [each.places])
        tensors = tuple((name, _tensor(array)) for name, array in each.tensors.items())
        start, length = int(own[0]), int(own[-1] - own[0]) + 1
        made.append(Media(each.kind, start, length, digest_of(each.kind, tensors), tensors))
    return tuple(made)


def digest_of(kind: str, tensors: Sequence[tuple[str, Tensor]]) -> str:
    """A hash of all that an image's features depend on."""
    seen = hashlib.sha256(kind.encode())
    for name, tensor in tensors:
        seen.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        seen.update(tensor.data)
    return seen.hexdigest()


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(str(array.dtype), array.shape, array.tobytes())
