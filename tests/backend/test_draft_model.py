"""A draft model's rows run ahead, are taken back, catch up, join and leave; and answers with it are those without it.

In most tests the draft model is the target itself, so every draft is what a plain run of the model says next.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from millstream.backend.device import current_device
from millstream.backend.generation.backend import MlxGenerationBackend
from millstream.backend.generation.drafters import draft_prompts
from millstream.backend.generation.drafters.draft_model import load_draft_model
from millstream.backend.generation.drafters.model_drafter import ModelDrafter
from millstream.backend.generation.sampling.sampler import Sampler
from millstream.backend.generation.settings import DraftSettings, GenerationSettings
from millstream.backend.weights.unpacking import nothing_packed
from millstream.engine.generation.messages import Generate, Generated
from millstream.errors import ModelError
from millstream.types import Sampling
from support.drafting import drafting
from support.engines import engine
from support.mixed_requests import mixed, seen
from support.tiny import VOCAB, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("draft"), "llama", seed=3)


def drafter_of(folder: Path, **changes: Any) -> ModelDrafter:
    settings = GenerationSettings("folder", folder, max_rows=6, draft=DraftSettings("folder", folder), **changes)
    draft = load_draft_model(settings, current_device(), nothing_packed)
    return ModelDrafter(draft, confident=False)


class Continued:
    """What a model says after some tokens, by plain forward passes."""

    def __init__(self, folder: Path) -> None:
        self._model, _ = load_model(folder)

    def __call__(self, tokens: Sequence[int], count: int, sampling: Sampling, position: int) -> tuple[int, ...]:
        caches = make_prompt_cache(self._model)
        logits = self._model(mx.array([list(tokens)]), cache=caches)[:, -1]
        sampler, found = Sampler([sampling]), []
        for step in range(count):
            token, _ = sampler.step(logits, mx.array([position + step]))
            found.append(int(token.item()))
            logits = self._model(token[None], cache=caches)[:, -1]
        return tuple(found)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(VOCAB) for _ in range(length))


def ready(drafter: ModelDrafter, wanted: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Drafts of all rows, once their prompts are read."""
    for _ in range(50):
        if len(found := drafter.propose(wanted)) == len(wanted):
            return found
    raise AssertionError("the prompts are never read")


@pytest.mark.parametrize(("seed", "like_gpu"), [(0, False), (1, True)])
def test_a_draft_is_what_the_model_says_next(folder: Path, seed: int, like_gpu: bool) -> None:
    """Rows of unequal lengths that gain their draft, a part of it, other tokens, or many at once; join and leave."""
    draw = random.Random(seed)
    drafter, continued = drafter_of(folder, like_gpu=like_gpu), Continued(folder)
    samplings = [Sampling(), Sampling(temperature=0.9, seed=5), Sampling(temperature=0.7, top_p=0.9, seed=6)]
    texts: dict[int, list[int]] = {}
    begun: dict[int, int] = {}
    for turn in range(10):
        if turn in (0, 3, 7):
            for name in (turn, turn + 1):
                tokens = prompt(name, draw.choice([1, 2, 40, 250]))
                drafter.join(Generate(name, tokens, 99, samplings[name % 3]))
                texts[name], begun[name] = list(tokens), len(tokens)
        if turn in (5, 9):
            gone = draw.choice(sorted(texts))
            drafter.drop({gone, 999})
            del texts[gone]
        wanted = {name: draw.choice([1, 3, 4, 8]) for name in texts if draw.random() < 0.8}
        drafts = ready(drafter, wanted) if wanted else {}
        for name, draft in drafts.items():
            position = len(texts[name]) - begun[name]
            assert draft == continued(texts[name], wanted[name], samplings[name % 3], position)
        for name, text in texts.items():
            draft = drafts.get(name, ())
            gained = [*draft[: draw.randrange(len(draft) + 1)], draw.randrange(VOCAB)]
            gained += prompt(turn, draw.choice([0, 0, 0, 30]))
            text += gained
            drafter.commit(name, gained)
    drafter.drop(set(texts))
    assert drafter.nbytes == 0


def test_a_long_prompt_is_read_over_several_proposals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_prompts, "FIRST", 100)
    monkeypatch.setattr(draft_prompts, "LONGEST", 100)
    drafter, continued = drafter_of(folder), Continued(folder)
    tokens = prompt(1, 350)
    drafter.join(Generate(1, tokens, 9))
    assert not drafter.propose({1: 2})
    drafter.commit(1, [7, 8])  # the target goes on meanwhile
    assert ready(drafter, {1: 2}) == {1: continued([*tokens, 7, 8], 2, Sampling(), 0)}
    # One that leaves while its prompt is read leaves nothing behind.
    drafter.join(Generate(2, prompt(2, 350), 9))
    drafter.propose({2: 2})
    drafter.drop({1, 2})
    assert drafter.nbytes == 0


def test_a_row_that_was_preempted_goes_on_at_its_position(folder: Path) -> None:
    drafter, continued = drafter_of(folder), Continued(folder)
    sampling = Sampling(temperature=1.0, seed=11)
    tokens = prompt(4, 20)
    drafter.join(Generate(1, tokens, 9, sampling, resumed=6))
    assert ready(drafter, {1: 4}) == {1: continued(tokens, 4, sampling, 6)}


def test_unknown_tokens_and_a_full_context_are_no_error(folder: Path) -> None:
    drafter = drafter_of(folder)
    drafter.join(Generate(1, (VOCAB + 5, 3, 4), 9, Sampling(logit_bias=((VOCAB + 7, 5.0),))))
    assert len(ready(drafter, {1: 2})[1]) == 2
    drafter.commit(1, [VOCAB + 9])
    assert len(drafter.propose({1: 2})[1]) == 2
    drafter.join(Generate(2, prompt(5, 511), 9))  # the model's context is 512
    assert 2 not in drafter.propose({1: 2, 2: 4})


def test_an_unsure_draft_ends_early(folder: Path) -> None:
    drafter = drafter_of(folder)
    drafter._confident = True
    drafter.join(Generate(1, prompt(6, 20), 99))
    assert len(ready(drafter, {1: 8})[1]) == 8
    drafter.commit(1, [1])
    drafter._token_seconds = drafter._step_seconds  # a step of the draft model is as dear as a token: nothing pays
    assert len(drafter.propose({1: 8})[1]) == 1


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_other_attention_is_refused(tmp_path: Path, family: str) -> None:
    path = write_model(tmp_path, family)
    with pytest.raises(ModelError, match="full attention"):
        drafter_of(path)


def similar(folder: Path, target: Path) -> Path:
    """A draft model that is often right: the target with noise in its weights."""
    folder.mkdir()
    weights: dict[str, mx.array] = mx.load(str(target / "model.safetensors"))  # type: ignore[assignment]
    mx.random.seed(1)
    noisy = {name: each + 0.004 * mx.random.normal(each.shape) for name, each in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), noisy)
    (folder / "config.json").write_bytes((target / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("preempt", [0.0, 0.08])
def test_answers_with_a_draft_model_are_those_without(folder: Path, tmp_path: Path, preempt: float) -> None:
    """Greedy and sampled rows, penalties, stop tokens; rows join, end and are preempted."""
    plain = GenerationSettings("folder", folder, max_rows=4, speculation=False)
    wanted = mixed(8, 14)
    with engine(lambda: MlxGenerationBackend(plain), prefill_tokens=16) as driver:
        assert driver.facts is not None and not driver.facts.drafters
        bytes_alone = driver.facts.weight_bytes, driver.facts.kv_bytes_per_token
        expected = seen(driver, wanted, cached=False)
    draft = DraftSettings("folder", similar(tmp_path / "similar", folder))
    settings = GenerationSettings("folder", folder, max_rows=4, draft=draft)
    made: list[MlxGenerationBackend] = []

    def make() -> MlxGenerationBackend:
        made.append(MlxGenerationBackend(settings))
        return made[-1]

    with engine(make, make_scheduler=functools.partial(drafting, 5, preempt=preempt)) as driver:
        assert driver.facts is not None and "draft-model" in driver.facts.drafters
        assert any("draft model" in note for note in driver.facts.notes)
        assert (driver.facts.weight_bytes, driver.facts.kv_bytes_per_token) == tuple(2 * each for each in bytes_alone)
        assert seen(driver, wanted, cached=False) == expected
        usages = [end.usage for ends in driver.ends.values() for end in ends if isinstance(end, Generated)]
        assert sum(each.accepted_prediction_tokens for each in usages) > 20
        assert sum(each.rejected_prediction_tokens for each in usages) > 5


def test_a_warm_up_leaves_nothing_behind(folder: Path) -> None:
    drafter, continued = drafter_of(folder), Continued(folder)
    drafter.warm_up()
    assert drafter.nbytes == 0
    tokens = prompt(9, 12)
    drafter.join(Generate(1, tokens, 9))
    assert ready(drafter, {1: 3}) == {1: continued(tokens, 3, Sampling(), 0)}
