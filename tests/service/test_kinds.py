"""Models of two kinds in one hub: each is served by its own use case, and asking for the wrong one is a clear error."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest

from millstream.config import ModelSpec, Settings
from millstream.engine.child_environment import engine_environment
from millstream.engine.messages import Failed
from millstream.errors import BadRequest, EngineBusy, WrongModelKind
from millstream.loading.engines import Engines
from millstream.loading.settings import EngineSettings, engine_settings
from millstream.models.demo import user_cache_dir
from millstream.service.admission import Admission
from millstream.service.generation.model import GenerationModel
from millstream.service.hub import ModelHub, card_of
from millstream.service.inbox import Inbox
from millstream.service.journal import Journal, Phase
from millstream.service.managed_model import LoadContext
from millstream.service.metrics import Metrics
from millstream.service.unread_output import UnreadOutput
from support.digest_kind import (
    CAPACITY,
    REFUSED,
    Digest,
    DigestBackend,
    Digested,
    DigestModel,
    DigestScheduler,
    expected,
)
from support.hubs import last_of, on_loop
from support.processes import children_find_us


class DigestServer:
    """What a second kind needs to be served: a loader and a use case. All else is shared."""

    def __init__(self, isolation: str, **settings: Any) -> None:
        self.engines = Engines(stop_patience=5.0)
        self.metrics = Metrics()
        self.hub = ModelHub(grace=1.0, patience=5.0, memory=2**20, **settings)
        self.model = self.hub.add("sha", ModelSpec("sha"), self._open, isolation=isolation, load_now=False)
        self.metrics.watch("sha", lambda: card_of(self.model))
        self.isolation = isolation
        self.unread = UnreadOutput(2**20)

    async def _open(self, loading: LoadContext) -> DigestModel:
        await loading.reserve(100, 100)
        admission = Admission(capacity=1, queue=2, fail_fast=False, unit="digests", param="input")
        engine, facts = await self.engines.start(
            "sha", DigestBackend, DigestScheduler, admission, loading, isolated=self.isolation == "process"
        )
        return DigestModel("sha", engine, facts, ModelSpec("sha"))

    async def post(self, number: int, data: bytes, rounds: int = 1) -> Inbox:
        async with self.hub.use("sha", DigestModel) as model:
            return model.engine.open_inbox([Digest(number, data, rounds)], self.unread)

    async def digest(self, number: int, data: bytes, rounds: int = 1) -> object:
        return await last_of(await self.post(number, data, rounds))


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    children_find_us(monkeypatch)
    return str(request.param)


def test_a_second_kind_is_loaded_served_measured_and_unloaded(isolation: str) -> None:
    @on_loop
    async def run() -> None:
        server = DigestServer(isolation)
        assert await server.digest(1, b"ab", 3) == Digested(1, expected(b"ab", 3))
        refused = await server.digest(2, REFUSED)
        assert isinstance(refused, Failed) and refused.refused
        card = server.hub.card("sha")
        assert (card.state, card.active, card.reserved_bytes) == ("ready", 0, 100)
        assert (card.max_batch, card.context_length, card.kv_bytes_per_token) == (None, None, None)
        assert card.memory_bytes >= 64
        assert b'millstream_model_ready{model="sha"} 1.0' in server.metrics.render()[0]
        server.hub.clear_cache("sha")
        assert (await server.hub.unload("sha")).state == "unloaded"
        assert await server.hub.close("the end", 1.0, 5.0)
        await server.engines.close()

    run()


def test_admission_counts_requests_of_any_kind(isolation: str) -> None:
    @on_loop
    async def run() -> None:
        server = DigestServer(isolation)
        await server.digest(0, b"warm")
        admission = server.model.model.engine.admission  # type: ignore[union-attr]
        with pytest.raises(BadRequest, match=f"needs 9 digests at once; this server accepts at most {CAPACITY + 2}"):
            admission.check(9)
        admission.admit(range(100, 100 + CAPACITY + 2))
        open_before = server.unread.count
        with pytest.raises(EngineBusy, match=f"{CAPACITY} active .* 2 waiting"):
            await server.post(1, b"x")
        assert server.unread.count == open_before, "a refused request leaves no inbox"
        for number in range(100, 100 + CAPACITY + 2):
            admission.release(number)
        assert await server.hub.close("the end", 1.0, 5.0)
        await server.engines.close()

    run()


@on_loop
async def test_asking_a_model_for_what_it_does_not_do_is_a_clear_error() -> None:
    server = DigestServer("thread")
    with pytest.raises(WrongModelKind, match="'sha' is a model for digests; this request needs one for generation"):
        async with server.hub.use("sha", GenerationModel):
            pass
    assert WrongModelKind.status == 400
    assert server.hub.card("sha").state == "ready", "nothing was lost"
    assert await server.hub.close("the end", 1.0, 5.0)
    await server.engines.close()


def test_an_engine_gets_its_own_settings_and_no_secret() -> None:
    secret = "sk-very-secret"
    settings = Settings(api_keys=(secret,), max_batch=7, memory=2**30, cors_origins=("http://secret.example",))
    own = engine_settings(settings, ModelSpec("x", max_batch=3, kv_bits=8))
    assert own == EngineSettings(
        max_batch=3,
        kv_bits=8,
        cache_limit=2**30 // 10,
        feature_bytes=2**30 // 20,
        kernel_dir=user_cache_dir() / "kernels",
    )
    assert b"secret" not in pickle.dumps(functools.partial(DigestBackend, own))  # type: ignore[arg-type]
    environment = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "MLX_X": "1", "PYTHONPATH": "p", "LC_ALL": "C"}
    secrets = {"MILLSTREAM_API_KEY": secret, "HF_TOKEN": secret, "AWS_SECRET_ACCESS_KEY": secret, "MY_PASSWORD": secret}
    assert engine_environment(environment | secrets) == environment


def test_the_journal_times_requests_of_any_kind(isolation: str) -> None:
    """A kind sends `Started`, and notes the phases that it has: nothing of the journal is about tokens."""

    @on_loop
    async def run() -> None:
        server = DigestServer(isolation)
        journal = Journal()
        record = journal.open("sha", "digest")
        async with server.hub.use("sha", DigestModel) as model:
            record.found(model.name)
            record.enter(Phase.QUEUE)
            inbox = model.engine.open_inbox(
                [Digest(1, b"ab", 3)], server.unread, on_started=lambda event: record.enter(Phase.PREFILL)
            )
        assert await last_of(inbox) == Digested(1, expected(b"ab", 3))
        journal.end(record, "done")
        assert [span.phase for span in record.phases] == [Phase.PREPARE, Phase.QUEUE, Phase.PREFILL]
        assert await server.hub.close("the end", 1.0, 5.0)
        await server.engines.close()

    run()
