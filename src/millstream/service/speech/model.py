"""A loaded speech model, as the service sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from millstream.model_facts import UNDESCRIBED, ModelDescription, SpeechFacts
from millstream.service.ready_model import ReadyModel
from millstream.text.speech.script import ScriptWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel(ReadyModel):
    kind: ClassVar[str] = "speech"
    capability: ClassVar[str] = "speech"

    facts: SpeechFacts
    writer: ScriptWriter
    files: ModelDescription = UNDESCRIBED
    """What its files say about it."""

    def card_fields(self) -> dict[str, Any]:
        return {"max_batch": self.facts.capacity}

    def describe(self) -> ModelDescription:
        able = ("instructions",) if self.facts.takes_instructions else ()
        return replace(self.files, capabilities=("speech", *able))
