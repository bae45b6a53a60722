"""Chooses at load what drafts for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from millstream.backend.generation.drafters.draft_model import DraftModel
from millstream.backend.generation.drafters.drafter import Drafter
from millstream.backend.generation.drafters.drafts import Drafts
from millstream.backend.generation.drafters.grammar import GrammarDrafter
from millstream.backend.generation.drafters.model_drafter import ModelDrafter
from millstream.backend.generation.drafters.prediction import PredictionDrafter
from millstream.backend.generation.drafters.prompt_lookup import SURE, PromptLookupDrafter
from millstream.backend.generation.mtp.drafter import MtpDrafter
from millstream.backend.generation.settings import GenerationSettings

Matcher = Callable[[int], LLMatcher | None]
"""See `GrammarDrafter`."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts for a model."""

    drafts: Drafts
    draft_model: DraftModel | None
    """Even if it does not draft: it may score prompts."""
    model_drafter: ModelDrafter | None = None
    notes: tuple[str, ...] = ()


def choose_drafters(
    settings: GenerationSettings,
    *,
    given: Sequence[Drafter] | None,
    refused: str | None,
    draft_model: DraftModel | None,
    mtp: MtpDrafter | None,
    matcher: Matcher,
    vocab_size: int,
) -> Drafting:
    """`given`: those to take instead of what the settings and the model bring. `refused`: why the model cannot verify
    drafts."""
    if refused is not None:
        return Drafting(Drafts(), draft_model, notes=(f"no speculative decoding: {refused}",))
    if not settings.speculation:
        return Drafting(Drafts(), draft_model, notes=("no speculative decoding: --speculation off",))
    notes = () if draft_model is None else (draft_model.note,)
    if given is not None:
        return Drafting(Drafts(given), draft_model, notes=notes)
    drafters: list[Drafter] = [GrammarDrafter(matcher, vocab_size), PredictionDrafter()]
    model_drafter = None
    if draft_model is not None:
        assert settings.draft is not None
        model_drafter = ModelDrafter(draft_model, settings.draft.depth)
        drafters += [PromptLookupDrafter(SURE), model_drafter]
    elif mtp is not None:
        drafters += [PromptLookupDrafter(SURE), mtp]
    else:
        drafters += [PromptLookupDrafter()]
    return Drafting(Drafts(drafters), draft_model, model_drafter, notes)
