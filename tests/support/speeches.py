"""Requests for speech engines, and their sound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from millstream.engine.speech.messages import Piece, Speak, Spoken
from millstream.engine.speech.plan import SpeechPlan, SpeechResult
from millstream.model_facts import SpeechFacts
from millstream.speech_types import Samples
from support.engines import Driver


def piece(tokens: Sequence[int]) -> Piece:
    return Piece(np.array(tokens, np.int32).tobytes())


def spoken_request(request_id: int, pieces: Iterable[Sequence[int]], *, more: bool = False) -> Speak:
    """A request for pieces of these tokens."""
    return Speak(request_id, tuple(piece(each) for each in pieces), more=more)


def sound_of(driver: Driver, request_id: int) -> Samples:
    """All samples that an engine gave for a request."""
    parts = [event.samples for event in driver.outputs[request_id] if isinstance(event, Spoken)]
    return np.frombuffer(b"".join(parts), np.float32)


def facts(batch_pieces: int = 1, open_batches: int = 1) -> SpeechFacts:
    return SpeechFacts(
        sample_rate=24_000,
        weight_bytes=64,
        dtype="float32",
        device="cpu (none)",
        batch_pieces=batch_pieces,
        open_batches=open_batches,
    )


def spoken(plan: SpeechPlan, *, done: bool = True) -> SpeechResult:
    """Sound that says whose it is: the request's number and the piece's."""
    return SpeechResult(tuple(bytes([each.request_id, each.index]) for each in plan.begin), done)
