"""A loaded transcription model, as the service sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from millstream.model_facts import UNDESCRIBED, ModelDescription, TranscriptionFacts
from millstream.service.ready_model import ReadyModel


@dataclass(frozen=True, slots=True)
class TranscriptionModel(ReadyModel):
    kind: ClassVar[str] = "transcription"
    capability: ClassVar[str] = "transcription"

    facts: TranscriptionFacts
    files: ModelDescription = UNDESCRIBED
    """What its files say about it."""

    def card_fields(self) -> dict[str, Any]:
        return {"max_batch": self.facts.max_rows, "languages": self.facts.languages}

    def describe(self) -> ModelDescription:
        found = capabilities(translates=self.facts.translates, word_times=self.facts.word_times)
        return replace(self.files, capabilities=found)


def capabilities(*, translates: bool, word_times: bool) -> tuple[str, ...]:
    """In the words of `ModelCard.capabilities`."""
    able = {"transcription": True, "translation": translates, "word_timestamps": word_times}
    return tuple(word for word, can in able.items() if can)
