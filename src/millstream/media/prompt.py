"""Puts media into a prompt: expands the chat template's placeholders and locates each file's tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from millstream.errors import BadRequest
from millstream.media.port import Placeholder, PreparedMedia
from millstream.types import Kind, Media, Tensor

Placeholders = Mapping[Kind, Placeholder]


def expand_placeholders(text: str, placeholders: Placeholders, media: Sequence[PreparedMedia]) -> str:
    """The rendered prompt, with each placeholder replaced by its media file's `text`."""
    kinds = {placeholder.text: kind for kind, placeholder in placeholders.items()}
    pieces = re.split("(" + "|".join(map(re.escape, kinds)) + ")", text)
    found = [kinds[placeholder] for placeholder in pieces[1::2]]
    if len(found) < len(media):
        raise BadRequest(
            f"the model's chat template has a place for {len(found)} of the {len(media)} media files of the request: "
            "it leaves out those of some roles, such as tool. Send them in a user message",
            param="messages",
        )
    if found != [each.kind for each in media]:
        raise BadRequest(
            f"the rendered prompt has {len(found)} media placeholders and the request has {len(media)} media files, or "
            f"their kinds differ in order. Remove {' and '.join(map(repr, kinds))} from the text of messages: the chat "
            "template writes the placeholders",
            param="messages",
        )
    pieces[1::2] = [each.text for each in media]
    return "".join(pieces)


def locate_media(
    tokens: Sequence[int], placeholders: Placeholders, media: Sequence[PreparedMedia]
) -> tuple[Media, ...]:
    """The media with their positions among the tokens of the expanded prompt."""
    token_ids = np.asarray(tokens)
    positions = {kind: np.flatnonzero(token_ids == each.token_id) for kind, each in placeholders.items()}
    for kind, found in positions.items():
        expected = sum(each.feature_tokens for each in media if each.kind == kind)
        if len(found) != expected:
            raise BadRequest(
                f"the prompt has {len(found)} of the model's {kind} tokens; its media need {expected}. Remove the "
                "names of special tokens from the text of messages",
                param="messages",
            )
    located = []
    for each in media:
        own, positions[each.kind] = np.split(positions[each.kind], [each.feature_tokens])
        tensors = tuple((name, _tensor(array)) for name, array in each.tensors.items())
        start, length = int(own[0]), int(own[-1] - own[0]) + 1
        located.append(Media(each.kind, start, length, media_digest(each.kind, tensors), tensors))
    return tuple(located)


def media_digest(kind: str, tensors: Sequence[tuple[str, Tensor]]) -> str:
    """A hash of everything that the features of a media file depend on."""
    digest = hashlib.sha256(kind.encode())
    for name, tensor in tensors:
        digest.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(str(array.dtype), array.shape, array.tobytes())
