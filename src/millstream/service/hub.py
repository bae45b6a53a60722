"""The models of a server, of every kind: found by name or alias, loaded on demand, unloaded when idle."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from millstream.config import ModelSpec
from millstream.errors import EngineGone, ModelError, NotFound, WrongModelKind
from millstream.model_facts import LoadProgress, ModelCard
from millstream.service.managed_model import Loader, ManagedModel, ModelState, report_defect
from millstream.service.memory_budget import MemoryBudget
from millstream.service.ready_model import ReadyModel
from millstream.service.watchdog import Watchdog

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=ReadyModel)


class ModelUse(Generic[ModelT]):
    """What `ModelHub.use` gives. A class, since every request passes here, and a generator costs several times as
    much."""

    __slots__ = ("_kind", "_managed")

    def __init__(self, managed: ManagedModel, kind: type[ModelT]) -> None:
        self._managed = managed
        self._kind = kind

    async def __aenter__(self) -> ModelT:
        managed, kind = self._managed, self._kind
        managed.begin_lease()
        try:
            model = await managed.ready()
            if not isinstance(model, kind):
                raise WrongModelKind(
                    f"{managed.name!r} is a model for {model.kind}; this request needs one for {kind.kind}.",
                    param="model",
                )
        except BaseException:
            managed.end_lease()
            raise
        return model

    async def __aexit__(self, *_: object) -> None:
        self._managed.end_lease()


class ModelHub:
    """Requests that name no model get the first one of the kind that they need."""

    def __init__(
        self,
        *,
        memory: int | None = None,
        idle_unload: float = 0.0,
        step_timeout: float = 0.0,
        grace: float = 20.0,
        patience: float = 30.0,
    ) -> None:
        self._models: dict[str, ManagedModel] = {}
        self._names: dict[str, ManagedModel] = {}
        self._idle_unload = idle_unload
        self._watchdog = Watchdog(step_timeout)
        self._grace = grace
        self._patience = patience
        self._closing: str | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._retiring: dict[str, tuple[ManagedModel, asyncio.Task[None]]] = {}
        """Removed models whose requests are still running, with the task that waits for their end."""
        self.memory = MemoryBudget(
            memory,
            reservations=lambda: [managed.reservation for managed in self._all()],
            unload=self._evict,
        )

    def add(self, name: str, spec: ModelSpec, loader: Loader, *, isolation: str, load_now: bool) -> ManagedModel:
        """Serve a model under `name` and its aliases; `load_now`: start to load it."""
        for known in (name, *spec.aliases):
            if known in self._names:
                raise ModelError(f"two models have the name or alias {known!r}; give one of them another one")
        if name in self._retiring:
            # It is added again before it has ended. Two of one name would share a memory reservation.
            managed, task = self._retiring.pop(name)
            task.cancel()
            self._models[name] = managed
            return self.update(name, spec, loader, isolation=isolation, reload=True, load_now=load_now)
        managed = ManagedModel(name, spec, loader, self.memory, isolation=isolation, idle_unload=self._idle_unload)
        self._models[name] = managed
        self._index()
        if load_now:
            managed.load_soon()
        if self._watch_task is None:
            self._watch_task = asyncio.ensure_future(self._watch())
            self._watch_task.add_done_callback(report_defect)
        return managed

    def remove(self, name: str, on_end: Callable[[], None] = lambda: None) -> None:
        """Accept no new requests for a model, and free it once its requests have ended; then call `on_end`."""
        managed = self._models.pop(name)
        self._index()
        task = self._run(self._retire(managed, on_end))
        self._retiring[name] = (managed, task)

    def update(
        self, name: str, spec: ModelSpec, loader: Loader, *, isolation: str, reload: bool, load_now: bool = False
    ) -> ManagedModel:
        """Give a model new options. `reload`: load it again if it is loaded; `load_now`: load it if it is not. The
        caller sees to it that names are unique once all updates are made."""
        managed = self._models[name]
        managed.configure(spec, loader, isolation=isolation)
        self._index()
        if reload:
            self._run(self._reload(managed, load_now))
        elif load_now:
            managed.load_soon()
        return managed

    def reorder(self, names: Sequence[str]) -> None:
        """The order of `cards`; the first one is for requests that name no model. `names` are all of them."""
        self._models = {name: self._models[name] for name in names}

    def cards(self) -> Sequence[ModelCard]:
        return [card_of(managed) for managed in self._models.values()]

    def card(self, name: str) -> ModelCard:
        return card_of(self._find(name))

    def loading(self) -> list[tuple[str, LoadProgress]]:
        """The models that are being loaded, and how far they are."""
        return [(each.name, each.progress) for each in self._models.values() if each.state is ModelState.LOADING]

    def use(self, name: str, kind: type[ModelT]) -> ModelUse[ModelT]:
        """Gives, in `async with`, the model, which is loaded if needed and is not unloaded inside the block: a request
        is posted there or fails. Raises `WrongModelKind` for a model of another kind."""
        if self._closing is not None:
            raise EngineGone(self._closing, retry_after=None)
        return ModelUse(self._find(name) if name else self._first_of(kind), kind)

    async def load(self, name: str) -> ModelCard:
        """Load a model, also one that has failed. Returns once it is loaded."""
        managed = self._find(name)
        with managed.lease():
            managed.load_soon()
            await managed.ready()
        return card_of(managed)

    async def unload(self, name: str) -> ModelCard:
        managed = self._find(name)
        await managed.unload("unloaded by request", grace=self._grace, patience=self._patience)
        return card_of(managed)

    def keep_loaded(self, name: str, seconds: float | None) -> ModelCard:
        """Set after how many idle seconds the model is unloaded this time. None: as the settings say. Infinity: never.
        A pinned model is not unloaded."""
        managed = self._find(name)
        managed.keep_loaded = None if seconds is None else max(seconds, 0.0)
        self._unload_if_due(managed)
        return card_of(managed)

    def clear_cache(self, name: str) -> ModelCard:
        """Drop what the model caches between requests. Does nothing if it is not loaded."""
        managed = self._find(name)
        if managed.model is not None:
            managed.model.clear_cache()
        return card_of(managed)

    async def settled(self) -> list[str]:
        """Wait until no model is loading or unloading; returns the names of those that have not failed."""
        await asyncio.gather(*(managed.settled() for managed in self._models.values()))
        return [managed.name for managed in self._models.values() if managed.state is not ModelState.FAILED]

    async def close(self, reason: str, grace: float, patience: float) -> bool:
        """Refuse new requests, let running ones finish for `grace` seconds, then stop the engines.

        Returns True if every engine freed its model within `patience` more seconds.
        """
        self._closing = reason
        if self._watch_task is not None:
            self._watch_task.cancel()
        for _, task in self._retiring.values():
            task.cancel()
        freed = await asyncio.gather(*(managed.close(reason, grace, patience) for managed in self._all()))
        return all(freed)

    def _find(self, name: str) -> ManagedModel:
        managed = self._names.get(name) if name else next(iter(self._models.values()), None)
        if managed is None:
            served = ", ".join(self._names) or "none"
            raise NotFound(f"the model {name!r} is not served here. Served: {served}.", param="model")
        return managed

    def _all(self) -> list[ManagedModel]:
        return [*self._models.values(), *(managed for managed, _ in self._retiring.values())]

    def _index(self) -> None:
        models = self._models.values()
        self._names = {name: managed for managed in models for name in (managed.name, *managed.spec.aliases)}

    async def _retire(self, managed: ManagedModel, on_end: Callable[[], None]) -> None:
        if managed.in_use:
            log.info("%s: removed; its running requests finish first", managed.name)
        await managed.retire("removed from the configuration", self._patience)
        del self._retiring[managed.name]
        on_end()

    async def _reload(self, managed: ManagedModel, load_now: bool) -> None:
        await managed.reload("its options have changed", self._patience)
        await managed.settled()
        if load_now:
            managed.load_soon()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(report_defect)
        return task

    def _first_of(self, kind: type[ReadyModel]) -> ManagedModel:
        """The first model of this kind, as far as it is known before a load; else the first model."""
        for managed in self._models.values():
            if isinstance(managed.model, kind) or kind.capability in managed.description.capabilities:
                return managed
        return self._find("")

    async def _evict(self, name: str) -> None:
        managed = next(managed for managed in self._all() if managed.name == name)
        await managed.unload_if_idle("to free memory for another model", self._patience)

    async def _watch(self) -> None:
        """Replace engines that hang, and unload models that have been idle for too long."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._watchdog.interval)
            now = time.monotonic()
            for managed in self._all():
                self._check(managed, now - before)
            before = now

    def _check(self, managed: ManagedModel, elapsed: float) -> None:
        model = managed.model or managed.leaving
        if model is None:
            return
        link = model.engine.link
        reason = self._watchdog.check(managed.name, link.heartbeat(), elapsed, stopped=link.stopped())
        if reason is not None:
            log.error("%s: %s", managed.name, reason)
            model.engine.disown(reason)
            return
        self._unload_if_due(managed)

    def _unload_if_due(self, managed: ManagedModel) -> None:
        if managed.state is ModelState.READY and managed.is_due:
            reason = f"idle for {managed.idle_seconds:.0f} s"
            self._run(managed.unload_if_idle(reason, self._patience))


def card_of(managed: ManagedModel) -> ModelCard:
    """Describes a model from the server's own state, without asking its engine."""
    model = managed.model
    engine = model.engine if model else None
    pid, thread = engine.link.where() if engine else (None, None)
    described = managed.description
    last_used, expires = _times_of(managed)
    return ModelCard(
        name=managed.name,
        created=managed.created,
        state=managed.state,
        aliases=managed.spec.aliases,
        progress=round(managed.progress.share, 3) if managed.state is ModelState.LOADING else None,
        phase=managed.progress.phase if managed.state is ModelState.LOADING else None,
        error=managed.error,
        isolation=managed.isolation,
        pid=pid,
        thread=thread,
        pinned=managed.spec.pin,
        memory_bytes=engine.memory_bytes if engine else 0,
        prefix_cache_bytes=engine.cache_bytes if engine else 0,
        prefix_cache_disk_bytes=engine.disk_bytes if engine else 0,
        kv_tokens=engine.kv_tokens if engine else None,
        reserved_bytes=managed.reservation.size or None,
        active=engine.admission.active if engine else 0,
        waiting=engine.admission.waiting if engine else 0,
        restarts=managed.restarts,
        capabilities=described.capabilities,
        format=described.format,
        family=described.family,
        parameters=described.parameters,
        quantization=described.quantization,
        template=described.template,
        file_bytes=described.file_bytes,
        device=model.facts.device if model else None,
        weight_bytes=model.facts.weight_bytes if model else None,
        notes=model.facts.notes if model else (),
        last_used=last_used,
        expires=expires,
        **(model.card_fields() if model else {"context_length": described.context_length}),
    )


def _times_of(managed: ManagedModel) -> tuple[float | None, float | None]:
    """When the model was last used and when it will be unloaded, by the clock on the wall."""
    if managed.model is None:
        return None, None
    last_used, limit = time.time() - managed.idle_seconds, managed.idle_limit
    return last_used, None if limit in (None, math.inf) else last_used + limit
