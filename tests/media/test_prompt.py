"""Places of media among the tokens of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.errors import BadRequest
from millstream.media.port import Mark, Prepared
from millstream.media.prompt import digest_of, expand, placed
from millstream.types import Kind, Tensor

MARKS: dict[Kind, Mark] = {"image": Mark("<b>", 7), "video": Mark("<v>", 8)}


def image(value: int = 0, places: int = 2, text: str = "<b>##<e>") -> Prepared:
    return Prepared("image", {"pixel_values": np.full((1, 2), value, np.float32)}, text, places)


def video() -> Prepared:
    return Prepared("video", {"pixel_values_videos": np.zeros((1, 2), np.float32)}, "<v>..", 1)


def test_markers_become_what_the_media_need() -> None:
    assert expand("a<b>c<v><b>d", MARKS, [image(), video(), image(text="x")]) == "a<b>##<e>c<v>..xd"


@pytest.mark.parametrize("text", ["none", "<b>", "<b><b><b>", "<b><v>", "<v><b>"])
def test_markers_that_do_not_fit(text: str) -> None:
    with pytest.raises(BadRequest, match="out of texts"):
        expand(text, MARKS, [image(), image()])


def test_places() -> None:
    first, film, last = placed([1, 7, 7, 2, 8, 3, 7, 5, 5, 7], MARKS, [image(1), video(), image(2)])
    assert (first.kind, first.start, first.length) == ("image", 1, 2)
    assert (film.kind, film.start, film.length) == ("video", 4, 1)
    assert (last.kind, last.start, last.length) == ("image", 6, 4), "what separates its rows is its own"
    assert first.tensors[0][1] == Tensor("float32", (1, 2), np.array([1, 1], np.float32).tobytes())


@pytest.mark.parametrize("tokens", [[7], [7, 7, 7], [1], [7, 7, 8]])
def test_tokens_that_the_client_wrote(tokens: list[int]) -> None:
    with pytest.raises(BadRequest, match="names of special tokens"):
        placed(tokens, MARKS, [image()])


def test_digests_tell_apart_whatever_features_depend_on() -> None:
    data = bytes(8)
    same = [("image", [("a", Tensor("float32", (1, 2), data))])] * 2
    other = [
        ("video", [("a", Tensor("float32", (1, 2), data))]),
        ("image", [("b", Tensor("float32", (1, 2), data))]),
        ("image", [("a", Tensor("int32", (1, 2), data))]),
        ("image", [("a", Tensor("float32", (2, 1), data))]),
        ("image", [("a", Tensor("float32", (1, 2), bytes(7) + b"x"))]),
        ("image", [("a", Tensor("float32", (1, 2), data)), ("b", Tensor("float32", (0,), b""))]),
    ]
    assert len({digest_of(kind, tensors) for kind, tensors in same + other}) == 1 + len(other)
