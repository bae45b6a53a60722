"""Conversations of an agent: a system prompt that all share, then turns of a tool's result and the model's answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from prompts import text_of

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Shape:
    """How long conversations get, in tokens."""

    tokens: int = 30_000
    turns: int = 20
    system: int = 2000
    answer: int = 100

    @property
    def result(self) -> int:
        """What each turn adds besides the answer, so that the last turn ends with `tokens`."""
        return max(1, (self.tokens - self.system) // self.turns - self.answer)


@dataclass(slots=True)
class Conversation:
    """The messages so far. Each turn is sent whole, as an agent does."""

    shape: Shape
    tokenizer: Tokenizer
    number: int
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        system = text_of(self.tokenizer, random.Random("system"), self.shape.system)
        self.messages.append({"role": "system", "content": system})

    def ask(self) -> list[Message]:
        """Add a tool's result and return what to send."""
        rng = random.Random(f"{self.number}/{len(self.messages)}")
        self.messages.append({"role": "user", "content": text_of(self.tokenizer, rng, self.shape.result)})
        return list(self.messages)

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
