"""The real backend, held by a gate. A child process imports this module, so it imports little."""

from __future__ import annotations

from millstream.engine.generation.plan import GenerationBackend
from millstream.engine.protocols import Progress, ignore_progress
from millstream.loading.backends import generation_backend
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from support.fifo_gate import RemoteGate
from support.wrapped import Gated, Wrapped


def held_backend(far: RemoteGate, source: ModelSource, settings: EngineSettings) -> GenerationBackend:
    """Waits at the gate before each step."""
    return Gated(generation_backend(source, settings), far)


class SlowLoad(Wrapped):
    """A backend whose load blocks until the gate opens."""

    def __init__(self, inner: GenerationBackend, gate: RemoteGate) -> None:
        super().__init__(inner)
        self._gate = gate

    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        self._gate.pass_through()
        return super().load(report)


def slow_load(far: RemoteGate, source: ModelSource, settings: EngineSettings) -> GenerationBackend:
    return SlowLoad(generation_backend(source, settings), far)


def slow_load_of(name: str, far: RemoteGate, source: ModelSource, settings: EngineSettings) -> GenerationBackend:
    """Only the model of this name waits at the gate."""
    return slow_load(far, source, settings) if source.path.name == name else generation_backend(source, settings)
