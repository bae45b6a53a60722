"""Placeholders in the prompt, and positions of media among its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.errors import BadRequest
from millstream.media.port import Placeholder, PreparedMedia
from millstream.media.prompt import expand_placeholders, locate_media, media_digest
from millstream.types import Kind, Tensor

PLACEHOLDERS: dict[Kind, Placeholder] = {"image": Placeholder("<b>", 7), "video": Placeholder("<v>", 8)}


def image(value: int = 0, tokens: int = 2, text: str = "<b>##<e>") -> PreparedMedia:
    return PreparedMedia("image", {"pixel_values": np.full((1, 2), value, np.float32)}, text, tokens)


def video() -> PreparedMedia:
    return PreparedMedia("video", {"pixel_values_videos": np.zeros((1, 2), np.float32)}, "<v>..", 1)


def test_placeholders_are_expanded() -> None:
    assert expand_placeholders("a<b>c<v><b>d", PLACEHOLDERS, [image(), video(), image(text="x")]) == "a<b>##<e>c<v>..xd"


@pytest.mark.parametrize("text", ["none", "<b>"])
def test_media_that_the_template_leaves_out(text: str) -> None:
    with pytest.raises(BadRequest, match="Send them in a user message"):
        expand_placeholders(text, PLACEHOLDERS, [image(), image()])


@pytest.mark.parametrize("text", ["<b><b><b>", "<b><v>", "<v><b>"])
def test_placeholders_that_do_not_match_the_media(text: str) -> None:
    with pytest.raises(BadRequest, match="from the text of messages"):
        expand_placeholders(text, PLACEHOLDERS, [image(), image()])


def test_positions() -> None:
    first, clip, last = locate_media([1, 7, 7, 2, 8, 3, 7, 5, 5, 7], PLACEHOLDERS, [image(1), video(), image(2)])
    assert (first.kind, first.start, first.length) == ("image", 1, 2)
    assert (clip.kind, clip.start, clip.length) == ("video", 4, 1)
    assert (last.kind, last.start, last.length) == ("image", 6, 4), "the tokens between its rows belong to it"
    assert first.tensors[0][1] == Tensor("float32", (1, 2), np.array([1, 1], np.float32).tobytes())


@pytest.mark.parametrize("tokens", [[7], [7, 7, 7], [1], [7, 7, 8]])
def test_special_tokens_in_the_clients_text(tokens: list[int]) -> None:
    with pytest.raises(BadRequest, match="names of special tokens"):
        locate_media(tokens, PLACEHOLDERS, [image()])


def test_digests_differ_in_everything_that_features_depend_on() -> None:
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
    assert len({media_digest(kind, tensors) for kind, tensors in same + other}) == 1 + len(other)
