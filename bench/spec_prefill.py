"""SpecPrefill: time to the first token with and without, and what it costs in quality on a made-up retrieval task.

python bench/spec_prefill.py first-token [tokens=32768] [shares=1,0.5,0.3,0.1] [target=MODEL draft=MODEL]
python bench/spec_prefill.py recall [tokens=4096] [shares=1,0.5,0.3,0.2,0.1,0.05] [prompts=20] [noise=0.1,0.2,0.3]

`first-token` runs a backend and its scheduler without HTTP; by default with random weights, a target of 2 small layers
and a draft of 1, half as wide. On a busy machine the processor time says more.

`recall` needs models that look things up, and a draft that does it less well. Both are made by hand, of two heads: one
looks at the token before, the other finds where the present token stood before and says what came after it. A prompt is
noise with 32 notes in it, a key and four values each, and ends with one of the keys; the answer is right if all four
values are. The draft's weights have noise added, relative to their own size: it answers fewer prompts by itself, and
its attention says less well where to look.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.backend.environment import load_blas

load_blas()  # before MLX is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from millstream.backend.generation.backend import MlxGenerationBackend  # noqa: E402
from millstream.backend.generation.caches.batch_caches import cache_arrays, new_row_caches  # noqa: E402
from millstream.backend.generation.layers.attention import adopt_attention, attention  # noqa: E402
from millstream.backend.generation.settings import DraftSettings, GenerationSettings  # noqa: E402
from millstream.backend.generation.spec_prefill.folding import Fold, FoldedLayer, read_spans  # noqa: E402
from millstream.backend.generation.spec_prefill.scorer import PromptScorer  # noqa: E402
from millstream.backend.generation.spec_prefill.spec_prefill import SpecPrefillSettings  # noqa: E402
from millstream.engine.generation.messages import Generate, Generated, Tokens  # noqa: E402
from millstream.engine.generation.plan import Prefill  # noqa: E402
from millstream.engine.generation.sparse_prompt import Spans, choose, length  # noqa: E402
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler  # noqa: E402
from models import TINY, find, random_model  # noqa: E402

FILLER, KEYS, VALUES = 200, 32, 200
VOCABULARY = FILLER + KEYS + VALUES
NOTE = 4
"""Values of a key."""
CODE, HEAD, THETA = 48, 128, 1e9
"""Numbers that tell tokens apart, the size of a head, and the base of its rotary periods."""
SHARP, EXACT = 30.0, 40.0
"""Scores of the token before, and of a token that is found again."""


def made_model(folder: Path, noise: float = 0.0) -> Path:
    """A model that says what came after the present token when it stood in the text before."""
    width = 3 * CODE + 16
    codes, before, answer, one = slice(0, CODE), slice(CODE, 2 * CODE), slice(2 * CODE, 3 * CODE), 3 * CODE
    draw = np.random.default_rng(1)
    tokens = draw.normal(size=(VOCABULARY, CODE))
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    half = HEAD // 2
    period = THETA ** (-np.arange(half) / half)

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, dtype=np.float32)

    embedding, head = zeros(VOCABULARY, width), zeros(VOCABULARY, width)
    embedding[:, codes], embedding[:, one] = tokens, 1.0
    head[:, answer] = 20 * tokens
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    scale = math.sqrt(HEAD)
    for layer in range(2):
        query, key, value, out = zeros(HEAD, width), zeros(HEAD, width), zeros(HEAD, width), zeros(width, HEAD)
        value[:CODE, codes] = np.eye(CODE)
        if layer == 0:
            # Fast periods tell positions apart: turned back by one, a query fits the token before it.
            fast = np.arange(16)
            query[fast, one], query[fast + half, one] = np.cos(period[fast]), -np.sin(period[fast])
            key[fast, one] = SHARP * scale
            out[before, :CODE] = np.eye(CODE)
        else:
            # Slow ones hardly turn: they compare what stands there.
            slow = np.arange(half - CODE // 2, half)
            places = np.concatenate([slow, slow + half])
            query[places, codes] = np.eye(CODE)
            key[places, before] = EXACT * scale * np.eye(CODE)
            out[answer, :CODE] = np.eye(CODE)
        prefix = f"model.layers.{layer}."
        for name, array in (("q_proj", query), ("k_proj", key), ("v_proj", value), ("o_proj", out)):
            weights[f"{prefix}self_attn.{name}.weight"] = array
        # Norms divide by the size of what they get, which is known: a code, a one, a code more after the first layer.
        weights[f"{prefix}input_layernorm.weight"] = np.full(width, math.sqrt((2 + layer) / width), dtype=np.float32)
        weights[f"{prefix}post_attention_layernorm.weight"] = np.ones(width, dtype=np.float32)
        for name, shape in (("gate_proj", (8, width)), ("up_proj", (8, width)), ("down_proj", (width, 8))):
            weights[f"{prefix}mlp.{name}.weight"] = zeros(*shape)
    weights["model.norm.weight"] = np.full(width, math.sqrt(4 / width), dtype=np.float32)
    for name, array in weights.items():
        if noise and array.ndim == 2 and array.any():
            # As large as its own numbers where they are not zero, everywhere.
            size = math.sqrt(float((array**2).sum()) / array.shape[0] / array.shape[1])
            weights[name] = (array + noise * size * draw.normal(size=array.shape)).astype(np.float32)
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-9,
        "vocab_size": VOCABULARY,
        "rope_theta": THETA,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(each) for name, each in weights.items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def notes(tokens: int, draw: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt and its answer. The note that is asked for is neither at the beginning nor at the end."""
    found = [draw.randrange(FILLER) for _ in range(tokens)]
    values = draw.sample(range(FILLER + KEYS, VOCABULARY), KEYS * NOTE)
    places = draw.sample(range(16, (tokens - 300) // (NOTE + 1)), KEYS)
    for key, place in enumerate(places):
        at = place * (NOTE + 1)
        found[at : at + NOTE + 1] = [FILLER + key, *values[key * NOTE : (key + 1) * NOTE]]
    asked = draw.randrange(KEYS)
    return (*found, FILLER + asked), tuple(values[asked * NOTE : (asked + 1) * NOTE])


def answer(model: Any, prompt: tuple[int, ...], kept: Spans) -> tuple[int, ...]:
    """What a model says that has read some spans of a prompt."""
    caches = new_row_caches(model)
    read_spans(model, prompt, kept, caches)
    mx.eval(cache_arrays(caches))
    said: list[int] = []
    while len(said) < NOTE:
        text = (*prompt, *said)
        fold = Fold([(len(text) - 1, len(text))])
        logits = model(fold.tokens_of(text), cache=[FoldedLayer(cache, fold) for cache in caches])
        said.append(int(mx.argmax(logits[0, -1]).item()))  # type: ignore[arg-type]
    return tuple(said)


def loaded(folder: Path) -> Any:
    model, _ = load_model(folder)
    adopt_attention(model, attention)
    return model


def recall(tokens: int, shares: Sequence[float], prompts: int, noises: Sequence[float]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        target = loaded(made_model(Path(folder) / "target"))
        for noise in noises:
            draft = loaded(made_model(Path(folder) / f"draft-{noise}", noise))
            draw, right, alone = random.Random(0), dict.fromkeys(shares, 0), 0
            for _ in range(prompts):
                prompt, wanted = notes(tokens, draw)
                end = len(prompt) - 1
                scorer = PromptScorer(draft)
                mx.eval(scorer.read([Prefill(Generate(1, prompt, 1), 0, len(prompt), scores=True)]))
                [(_, importance)] = scorer.take()
                alone += answer(draft, prompt, ((0, end),)) == wanted
                for share in shares:
                    kept = choose(importance, share, 0, end)
                    assert length(kept) <= end
                    right[share] += answer(target, prompt, kept) == wanted
            found = ", ".join(f"{share:g}: {100 * count / prompts:.0f} %" for share, count in right.items())
            yield f"noise {noise:g}: the draft alone is right in {100 * alone / prompts:.0f} %; by share read {found}"


def first_token(tokens: int, shares: Sequence[float], names: tuple[str, str] | None) -> Iterator[str]:
    """One load. The prompts are of random tokens, each another one."""
    with tempfile.TemporaryDirectory() as folder:
        if names is None:
            target = random_model(Path(folder) / "target", TINY)
            smaller = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "num_attention_heads": 2}
            draft = random_model(Path(folder) / "draft", {**TINY, **smaller, "num_key_value_heads": 1})
        else:
            target, draft = map(find, names)
        settings = GenerationSettings(
            *("folder", target, 4),
            draft=DraftSettings("folder", draft),
            spec_prefill=SpecPrefillSettings(0.5, 1024),
            speculation=False,
        )
        backend = MlxGenerationBackend(settings)
        facts = backend.load()
        if facts.spec_prefill is None:
            yield facts.notes[-1]
            return
        yield f"a token costs the draft model {facts.spec_prefill.cost:.2f} of what it costs the model"
        draw, ids = random.Random(1), itertools.count(1)
        for share in (min(shares), *shares):
            # The first run warms up.
            chosen = dataclasses.replace(facts.spec_prefill, share=share)
            scheduler = make_scheduler(SchedulerSettings(), dataclasses.replace(facts, spec_prefill=chosen))
            number = next(ids)
            count = 4096 if number == 1 else tokens
            prompt = tuple(draw.randrange(10, facts.vocab_size) for _ in range(count))
            scheduler.submit(Generate(number, prompt, 2, spec_prefill=share < 1))
            began, used = time.perf_counter(), time.process_time()
            first, processor, skipped = 0.0, 0.0, 0
            while not scheduler.idle:
                plan = scheduler.plan()
                begun = time.perf_counter()
                result = backend.step(plan)
                for event in scheduler.advance(plan, result, time.perf_counter() - begun):
                    if isinstance(event, Tokens) and not first:
                        first, processor = time.perf_counter() - began, time.process_time() - used
                    if isinstance(event, Generated):
                        skipped = event.usage.skipped_tokens
            if number > 1:
                yield (
                    f"share {share:g}: first token of {tokens} after {first:.2f} s ({processor:.2f} s of processor "
                    f"time); {skipped} tokens skipped"
                )


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in ("recall", "first-token"):
        sys.exit(__doc__)
    given = dict(each.split("=", 1) for each in arguments[1:])

    def numbers(name: str, default: str) -> list[float]:
        return [float(each) for each in given.get(name, default).split(",")]

    if arguments[0] == "recall":
        shares = numbers("shares", "1,0.5,0.3,0.2,0.1,0.05")
        lines = recall(
            int(given.get("tokens", 4096)), shares, int(given.get("prompts", 20)), numbers("noise", "0.1,0.2,0.3")
        )
    else:
        lines = first_token(
            int(given.get("tokens", 32768)),
            numbers("shares", "1,0.5,0.3,0.1"),
            (given["target"], given["draft"]) if "target" in given else None,
        )
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
