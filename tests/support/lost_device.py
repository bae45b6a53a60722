"""A backend whose device fails while the model is loaded, unless the fast path with the bad kernel is left out."""

from __future__ import annotations

import os
import signal

from millstream.engine.protocols import Progress, ignore_progress
from millstream.errors import DeviceLost
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from support.fake import FakeBackend


class LosesDevice(FakeBackend):
    def __init__(self, disabled: frozenset[str]) -> None:
        super().__init__()
        self._disabled = disabled

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        if "fused-matmul" not in self._disabled:
            raise DeviceLost("the device failed: illegal instruction")
        if "kernel" not in self._disabled:
            os.kill(os.getpid(), signal.SIGABRT)
        return super().load(report)


def loses_device(source: ModelSource, settings: EngineSettings) -> FakeBackend:
    return LosesDevice(settings.disabled)
