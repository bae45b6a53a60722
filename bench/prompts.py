"""Random prompts of an exact number of tokens, no two of which share a prefix."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from millstream.bench.words import words


class Prompts:
    """Prompts for one server. Two of the same seed make the same prompts, so every server gets the same work.

    Millstream takes token ids. mlx-lm's server takes text only: it gets text that has as many tokens.
    """

    def __init__(self, folder: Path, *, as_text: bool, seed: int = 0) -> None:
        self._as_text = as_text
        self._seed = seed
        self._made = 0
        config = json.loads((folder / "config.json").read_text())
        self._vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if as_text else None

    def make(self, tokens: int) -> list[int] | str:
        self._made += 1
        rng = random.Random(f"{self._seed}/{self._made}")
        if self._tokenizer is not None:
            return text_of(self._tokenizer, rng, tokens)
        # Special tokens stand at either end of a vocabulary, and image tokens at its end.
        return [rng.randrange(self._vocabulary // 8, self._vocabulary // 2) for _ in range(tokens)]


def text_of(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> str:
    """Random words that are `tokens` tokens long."""
    text = words(rng, max(1, tokens // 4))
    while len(encoding := tokenizer.encode(text, add_special_tokens=False)) < tokens:
        text += " " + words(rng, tokens)
    end: int = encoding.offsets[tokens - 1][1]
    return text[:end]
