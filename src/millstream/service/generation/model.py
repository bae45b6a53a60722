"""A loaded text generation model: engine, tokenizer, chat format, media preprocessor and template."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from millstream.engine.generation.messages import ClearPrefixCache
from millstream.engine.messages import Speculated
from millstream.media.port import MediaPreprocessor
from millstream.model_facts import UNDESCRIBED, DraftCount, GenerationFacts, ModelDescription, SpeculationCard
from millstream.service.generation.template_host import TemplateHost
from millstream.service.ready_model import ReadyModel
from millstream.text.chat_format import PLAIN, ChatFormat
from millstream.text.control_tokens import ControlTokens
from millstream.text.fill_in_middle import FillInMiddle
from millstream.text.templates.conversation import has_native_tools
from millstream.text.tokenizer import Tokenizer


def capabilities(chat_format: ChatFormat, media: Collection[str], *, insert: bool = False) -> tuple[str, ...]:
    """What a model can do, in the words of `ModelCard.capabilities`. `media`: kinds of input besides text. `insert`:
    it can fill in the middle."""
    found = {
        "completion": True,
        "tools": has_native_tools(chat_format),
        "thinking": chat_format.reasoning is not None,
        "vision": "image" in media,
        "audio": "audio" in media,
        "insert": insert,
    }
    return tuple(name for name, present in found.items() if present)


@dataclass(frozen=True, slots=True)
class GenerationModel(ReadyModel):
    """Everything that a generation request needs from its model."""

    kind: ClassVar[str] = "generation"
    capability: ClassVar[str] = "completion"

    facts: GenerationFacts
    tokenizer: Tokenizer
    chat_format: ChatFormat = PLAIN
    preprocessor: MediaPreprocessor | None = None
    """None if the model takes text only."""
    template: TemplateHost | None = None
    control: ControlTokens | None = None
    """Control tokens to escape in messages. None if clients may write control tokens."""
    files: ModelDescription = UNDESCRIBED
    """What its files say about it."""
    sampling: tuple[tuple[str, float], ...] = ()
    """The defaults that its files recommend, as pairs of name and value."""
    fim: FillInMiddle | None = None
    """None if the model cannot fill in the middle."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of media that the preprocessor can prepare and the engine can encode."""
        return frozenset(self.facts.media).intersection(
            self.preprocessor.placeholders if self.preprocessor is not None else ()
        )

    def clear_cache(self) -> None:
        self.engine.post(ClearPrefixCache())

    def card_fields(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "kv_bytes_per_token": facts.kv_bytes_per_token,
            "max_batch": facts.max_rows,
            "context_length": facts.context_length,
            "calibration": facts.calibration,
            "speculation": self._speculation(),
        }

    def _speculation(self) -> SpeculationCard | None:
        if not self.facts.drafters:
            return None
        done = self.engine.speculated or Speculated()
        drafts = tuple(DraftCount(*each) for each in done.drafters)
        return SpeculationCard(self.facts.drafters, done.passes, drafts, done.gain)

    def describe(self) -> ModelDescription:
        template = self.tokenizer.template
        return replace(
            self.files,
            context_length=self.facts.context_length,
            template=template.source if template is not None else None,
            capabilities=capabilities(self.chat_format, self.kinds, insert=self.fim is not None),
        )
