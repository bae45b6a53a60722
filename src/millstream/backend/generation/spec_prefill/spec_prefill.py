"""SpecPrefill on the owner: whether a pair of models can do it, what that costs, and the scoring of prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from millstream.backend.generation.caches.batch_caches import cache_arrays, new_row_caches
from millstream.backend.generation.caches.quantized import KvQuantization, new_prompt_caches
from millstream.backend.generation.layers.attention import adopt_attention
from millstream.backend.generation.layers.slab_attention import Attention
from millstream.backend.generation.spec_prefill.folding import read_spans
from millstream.backend.generation.spec_prefill.scorer import PromptScorer
from millstream.engine.generation.sparse_prompt import GRID
from millstream.model_facts import SpecPrefillFacts

AGREED = 0.1
"""How far the logits of a prompt that is read in pieces may be from those of one that is read as a whole, relative to
their spread: as for the layouts of a batch."""

MEASURED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SpecPrefillSettings:
    share: float
    """Of the tokens of a long prompt, how many the target reads."""
    least: int = 4096
    """The fewest tokens of a long prompt, without those in the prefix cache."""


class Declined(Exception):
    """These models cannot do it. The message is the reason."""


def spec_prefill(
    settings: SpecPrefillSettings,
    model: Any,
    draft: Any,
    *,
    vocab_size: int,
    packing: KvQuantization | None = None,
    measure: bool = True,
    attention: Attention | None = None,
) -> tuple[PromptScorer, SpecPrefillFacts, str]:
    """Returns what scores prompts, what the scheduler must know, and a note. Raises `Declined`.

    `model` must call our attention and have full attention in all layers. `attention`: for a draft model whose layers
    call mlx-lm's function. `measure`: time both models; otherwise their sizes tell what a draft's token costs.
    """
    if any(type(cache) is not KVCache for cache in new_row_caches(draft)):
        raise Declined("the draft model has layers without full attention")
    if attention is not None:
        adopt_attention(draft, attention)
    scorer = PromptScorer(draft)
    tokens = [vocab_size // (2 + index % 40) for index in range(3 * GRID)]
    try:
        apart = _disagreement(model, tokens, packing)
        scorer.check(tokens)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise Declined(str(error) or type(error).__name__) from error
    if not apart <= AGREED:
        raise Declined(f"a prompt that is read in pieces answers differently ({apart:.2f})")
    cost = _measured_cost(model, draft, vocab_size) if measure else _bytes(draft) / max(1, _bytes(model))
    facts = SpecPrefillFacts(settings.share, settings.least, cost)
    note = (
        f"SpecPrefill: of prompts over {settings.least} tokens the model reads {settings.share:.0%}, which its draft "
        "model chooses; answers may miss what it has not read"
    )
    return scorer, facts, note


def _disagreement(model: Any, tokens: Sequence[int], packing: KvQuantization | None) -> float:
    """How far the logits after a prompt that is read in pieces, all of them, are from those of a plain one."""
    cuts = (((0, GRID), (GRID, 2 * GRID + 5)), ((2 * GRID + 5, len(tokens) - 1),))
    found = []
    for pieces in (True, False):
        caches = new_prompt_caches(model, packing)
        if pieces:
            for spans in cuts:
                read_spans(model, tokens, spans, caches)
        else:
            model(mx.array([tokens[:-1]], dtype=mx.int32), cache=caches)
        logits = model(mx.array([tokens[-1:]], dtype=mx.int32), cache=caches)[0, -1].astype(mx.float32)
        found.append(logits - mx.mean(logits))
    distance = mx.linalg.norm(found[0] - found[1]) / mx.linalg.norm(found[1])
    return float(distance.item())  # type: ignore[arg-type]


def _measured_cost(model: Any, draft: Any, vocab_size: int) -> float:
    """What a token costs the draft, in tokens of the target."""
    tokens = mx.array([[vocab_size // (2 + index % 40) for index in range(MEASURED_TOKENS)]], dtype=mx.int32)

    def seconds(each: Any) -> float:
        best = float("inf")
        for _ in range(3):
            caches = new_row_caches(each)
            began = time.perf_counter()
            each(tokens, cache=caches)
            mx.eval(cache_arrays(caches))
            best = min(best, time.perf_counter() - began)
        return best

    return seconds(draft) / seconds(model)


def _bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))
