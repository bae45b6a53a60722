"""Opens realtime sessions: finds their models, and bounds their number."""

from __future__ import annotations

from dataclasses import replace

from millstream.errors import BadRequest, NotFound, Overloaded, WrongModelKind
from millstream.model_facts import ModelCard
from millstream.realtime_types import ClientSecret, InputTranscription, SessionConfig
from millstream.service.ports import ModelService, Outbox
from millstream.service.realtime.secrets import ClientSecrets
from millstream.service.realtime.session import Session, SessionServices

MAX_SESSIONS = 64
"""Each may hold minutes of audio, and keeps engines busy."""
TRANSCRIPTION, SPEECH, CHAT = "transcription", "speech", "completion"
"""Capabilities of models."""
SPEECH_PARAM = "session.audio.output.model"


class RealtimeSessions:
    """Implements `ports.RealtimeService`."""

    def __init__(self, models: ModelService, services: SessionServices, *, limit: int = MAX_SESSIONS) -> None:
        self._models = models
        self._services = services
        self._limit = limit
        self._open: set[Session] = set()
        self._secrets = ClientSecrets()

    @property
    def count(self) -> int:
        return len(self._open)

    def open(self, config: SessionConfig, outbox: Outbox) -> Session:
        if len(self._open) >= self._limit:
            raise Overloaded(f"{self._limit} realtime sessions are open already. Try again in a moment.")
        config = self._of_kind(config)
        # A server without a voice answers in text, and its clients see that in the session.
        speaks = config.speaks and bool(self._named(config.speech_model, SPEECH, SPEECH_PARAM))
        resolved = self.resolve(replace(config, speaks=speaks))
        session = Session(resolved, self._services, outbox, closed=self._open.discard)
        self._open.add(session)
        return session

    def issue_secret(self, config: SessionConfig, seconds: int) -> ClientSecret:
        return self._secrets.issue(config, seconds)

    def redeem_secret(self, value: str) -> SessionConfig | None:
        return self._secrets.find(value)

    def _of_kind(self, config: SessionConfig) -> SessionConfig:
        """A connection may name a transcription model, or the server may have no other: then it transcribes."""
        if config.model and self._is(TRANSCRIPTION, self._models.model(config.model)):
            asked = replace(config.transcription or InputTranscription(), model=config.model)
            return replace(config, kind="transcription", transcription=asked)
        cards = self._models.models()
        able = {name for card in cards for name in card.capabilities}
        if not config.model and CHAT not in able and TRANSCRIPTION in able:
            return replace(config, kind="transcription")
        return config

    def resolve(self, config: SessionConfig) -> SessionConfig:
        if config.kind == "transcription" and config.transcription is None:
            config = replace(config, transcription=InputTranscription())
        asked = config.transcription or InputTranscription()
        transcriber = self._named(asked.model, TRANSCRIPTION, "session.audio.input.transcription.model")
        config = replace(config, transcriber=transcriber)
        if config.transcription is not None:
            config = replace(config, transcription=replace(config.transcription, model=transcriber))
        if config.kind == "transcription":
            if not transcriber:
                raise NotFound("This server has no transcription model.", param="model")
            return config
        speech_model = self._named(config.speech_model, SPEECH, SPEECH_PARAM)
        if config.speaks and not speech_model:
            raise NotFound('This server has no speech model: output_modalities must be ["text"].', param=SPEECH_PARAM)
        return replace(config, model=self._chat_model(config.model), speech_model=speech_model)

    def _named(self, name: str, capability: str, param: str) -> str:
        """The name of a model of a kind, or of the first one; "" if there is none."""
        if not name:
            return self._first(capability)
        card = self._models.model(name)
        # The capabilities of a model that was not loaded yet may be unknown.
        if card.capabilities and not self._is(capability, card):
            raise WrongModelKind(f"{card.name} is no {capability} model.", param=param)
        return card.name

    def _first(self, capability: str) -> str:
        """Raises `Overloaded` while a model is loading whose files did not tell yet what it can do."""
        cards = self._models.models()
        found = next((card.name for card in cards if self._is(capability, card)), "")
        unknown = next((card.name for card in cards if not card.capabilities and card.state == "loading"), None)
        if not found and unknown is not None:
            raise Overloaded(f"{unknown} is still loading. Try again in a moment.")
        return found

    @staticmethod
    def _is(capability: str, card: ModelCard) -> bool:
        return capability in card.capabilities

    def _chat_model(self, name: str) -> str:
        if name:
            card = self._models.model(name)
            if card.capabilities and CHAT not in card.capabilities:
                raise WrongModelKind(
                    f"{card.name} does not chat. For a transcription session, connect with ?intent=transcription.",
                    param="model",
                )
            return card.name
        if not (found := self._first(CHAT)):
            raise BadRequest("This server has no chat model. Connect with ?intent=transcription.", param="model")
        return found
