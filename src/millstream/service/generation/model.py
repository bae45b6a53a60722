"""A loaded model that generates text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from millstream.engine.generation.messages import ClearPrefixCache
from millstream.media.port import MediaPreprocessor
from millstream.model_facts import GenerationFacts
from millstream.service.generation.template_host import TemplateHost
from millstream.service.ready_model import ReadyModel
from millstream.text.chat_format import PLAIN, ChatFormat
from millstream.text.control_tokens import ControlTokens
from millstream.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationModel(ReadyModel):
    """All that a generation request needs of its model."""

    kind: ClassVar[str] = "generation"

    facts: GenerationFacts
    tokenizer: Tokenizer
    chat_format: ChatFormat = PLAIN
    preprocessor: MediaPreprocessor | None = None
    """None if the model takes text only."""
    template: TemplateHost | None = None
    control: ControlTokens | None = None
    """Control tokens that must not take effect in messages; None if clients may write control tokens."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of media that the processor can prepare and the engine can encode."""
        return frozenset(self.facts.media).intersection(
            self.preprocessor.placeholders if self.preprocessor is not None else ()
        )

    def clear_cache(self) -> None:
        self.engine.post(ClearPrefixCache())

    def card_fields(self) -> dict[str, int]:
        facts = self.facts
        return {
            "kv_bytes_per_token": facts.kv_bytes_per_token,
            "max_batch": facts.max_rows,
            "context_length": facts.context_length,
        }
