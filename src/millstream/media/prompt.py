"""Where images stand in a prompt: the template's markers become the tokens that the processor asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from millstream.errors import BadRequest
from millstream.media.port import MediaReader, Prepared
from millstream.types import Media, Tensor


def expand(text: str, reader: MediaReader, images: Sequence[Prepared]) -> str:
    """The rendered prompt with each marker replaced by what its image needs."""
    pieces = text.split(reader.marker)
    if len(pieces) != len(images) + 1:
        raise BadRequest(
            f"the prompt has {len(pieces) - 1} places for images ({reader.marker!r}) and the request {len(images)} "
            f"images. Leave {reader.marker!r} out of texts: the model's template writes it",
            param="messages",
        )
    between = [image.text + piece for image, piece in zip(images, pieces[1:], strict=True)]
    return "".join([pieces[0], *between])


def placed(tokens: Sequence[int], reader: MediaReader, images: Sequence[Prepared]) -> tuple[Media, ...]:
    """The images with their places among the tokens of the expanded prompt."""
    places = np.flatnonzero(np.asarray(tokens) == reader.token_id)
    wanted = sum(image.places for image in images)
    if len(places) != wanted:
        raise BadRequest(
            f"the prompt has {len(places)} of the model's own image tokens where its images take {wanted}. Leave the "
            "names of special tokens out of texts",
            param="messages",
        )
    found = []
    for image in images:
        own, places = places[: image.places], places[image.places :]
        tensors = tuple((name, _tensor(array)) for name, array in image.tensors.items())
        start, length = int(own[0]), int(own[-1] - own[0]) + 1
        found.append(Media("image", start, length, digest_of("image", tensors), tensors))
    return tuple(found)


def digest_of(kind: str, tensors: Sequence[tuple[str, Tensor]]) -> str:
    """A hash of all that an image's features depend on."""
    seen = hashlib.sha256(kind.encode())
    for name, tensor in tensors:
        seen.update(f"\0{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        seen.update(tensor.data)
    return seen.hexdigest()


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(str(array.dtype), array.shape, array.tobytes())
