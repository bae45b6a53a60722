"""The words that prompts and inputs are made of. Imports nothing else, so that scripts without HTTP can use it."""

from __future__ import annotations

import random

WORDS = (
    *("water", "wheel", "stone", "grain", "river", "mill", "flour", "sack", "cart", "road", "bread", "oven", "field"),
    *("wind", "sail", "gear", "axle", "rope", "bell", "gate", "bridge", "boat", "fish", "reed", "heron", "frost"),
    *("thaw", "flood", "spring", "dam", "pond", "sluice", "race", "weir", "bank", "willow", "alder", "moss", "owl"),
)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
