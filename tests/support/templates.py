"""Chat templates rendered in the test's own process, for tests of what comes out and not of where it runs."""

from __future__ import annotations

from functools import cache
from typing import Any

from millstream.text.templates.abilities import TemplateAbilities
from millstream.text.templates.child import render
from millstream.text.templates.conversation import TemplateInput
from millstream.text.templates.probe import probe
from millstream.text.templates.template import ChatTemplate, TemplateSource
from millstream.text.tokenizer import Tokenizer


def rendered(source: TemplateSource | None, rendering: TemplateInput, markers: dict[str, str] | None = None) -> str:
    assert source is not None
    job: dict[str, Any] = {
        "variants": rendering.variants,
        "kwargs": rendering.kwargs,
        "continues": rendering.continues,
        "markers": markers,
        "limit": 2**20,
    }
    return render(_compiled(source.source, tuple(source.tokens.items())), job)


def abilities_of(source: TemplateSource | None) -> TemplateAbilities:
    assert source is not None
    return _probed(source.source, tuple(source.tokens.items()))


@cache
def _probed(source: str, tokens: tuple[tuple[str, str], ...]) -> TemplateAbilities:
    return probe(_compiled(source, tokens).render)


@cache
def _compiled(source: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(tokens))


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: object) -> str:
    return rendered(tokenizer.template, TemplateInput([messages], kwargs))


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: object) -> list[int]:
    return tokenizer.encode(render_chat(tokenizer, messages, **kwargs), special=False)
