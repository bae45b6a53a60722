"""The MLX backend for text models. Made, used and freed on the owner thread."""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from millstream.backend.attention import adopt_attention
from millstream.backend.batch import Batch, Launched
from millstream.backend.caches import MergedCaches, bytes_per_token, new_row, states, unbatchable
from millstream.backend.cpu_attention import cpu_attention
from millstream.backend.cpu_layers import pays_here, turn_layers, turned_layer
from millstream.backend.device import current_device
from millstream.backend.exchange import exchange_function
from millstream.backend.guides import Compiler
from millstream.backend.identity import identity_of
from millstream.backend.kept_blocks import KeptBlocks
from millstream.backend.leaves import kept_sizes
from millstream.backend.loading import load
from millstream.backend.packed_attention import Attention, packed_attention, products_fit
from millstream.backend.projections import fuse_projections
from millstream.backend.prompts import BlockReader, PromptReader, SingleReader
from millstream.backend.quantized_kv import KvPacking, QuantizedSlotLayer, packing_for, refusal, row_of
from millstream.backend.reach import evaluate_all
from millstream.backend.rehearsal import rehearse
from millstream.backend.slots import SlotCaches, all_plain, exact, powers_of_two
from millstream.engine.backend import Keep, Plan, Prefill, Progress, RowFailure, RowOutput, StepResult, ignore_progress
from millstream.engine.messages import Submit
from millstream.engine.ownership import OwnerGuard
from millstream.errors import ModelError
from millstream.types import KeptSizes, ModelFacts

if TYPE_CHECKING:
    from millstream.backend.sight import Seen, Sight

BLIND = "this model takes text only"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextModelSettings:
    kind: Literal["folder", "gguf"]
    path: Path
    max_rows: int
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out: see `config.FAST_PATHS`."""
    blas: str | None = None
    """The library that CPU products go through, for the log."""
    cache_limit: int | None = None
    """Bytes of freed memory that MLX may keep for later. None: as many as MLX likes."""
    kv_bits: int = 0
    """Keys and values in 8 or 4 bits; 0 for the type that the model computes in."""
    feature_bytes: int = 256 * 2**20
    """What the encoded images that are kept for later requests may take."""
    like_gpu: bool = False
    """Lay out slots and group prompts as on a GPU, whatever the device: so that the CPU can test it."""
    grammars: Compiler | None = None
    """For rows whose answers must match a grammar."""


class MlxTextBackend:
    """Runs a step behind: a step is launched before the last one's tokens are read, so the device never waits
    for Python. A row that ends has run once more than it needed; that result is dropped with the row."""

    def __init__(self, settings: TextModelSettings) -> None:
        self._guard = OwnerGuard()
        self._settings = settings
        # new_stream, not a thread-local one: on a foreign thread it raises instead of silently making a second.
        self._stream = mx.new_stream(mx.default_device())
        mx.set_default_stream(self._stream)
        if settings.cache_limit is not None:
            mx.set_cache_limit(settings.cache_limit)
        self._model: Any = None
        self._device = current_device()
        self._slots = self._wide = False
        self._packing: KvPacking | None = None
        self._attention: Attention = scaled_dot_product_attention
        self._batch: Batch | None = None
        self._prompts: PromptReader | None = None
        self._pending: Launched | None = None
        self._vocab_size = 0
        self._weight_bytes = 0
        self._kept = KeptBlocks()
        self._sight: Sight | None = None

    def load(self, report: Progress = ignore_progress) -> ModelFacts:
        """Owner only. Load, evaluate all, choose how rows share a batch, and warm up."""
        self._guard.check("load")
        settings = self._settings
        loaded = load(settings.kind, settings.path, self._device, unpack=settings.unpack)
        self._model, self._vocab_size = loaded.model, loaded.vocab_size
        if loaded.whole is not None:
            # Here, since mlx-vlm may not be installed.
            from millstream.backend.sight import Sight

            self._sight = Sight(self._model, settings.feature_bytes)
        self._lay_out()
        self._weight_bytes = evaluate_all(self._model, report)
        notes = list(loaded.notes)
        obstacle = self._choose()
        max_rows = settings.max_rows
        if obstacle is not None:
            max_rows = 1
            notes.append(f"one request at a time: {obstacle} cannot be batched")
        if self._packing is not None:
            notes.append(f"keys and values in {self._packing.bits} bits, in groups of {self._packing.group_size}")
        self.reset()
        token_bytes, keeps = self._probe()
        facts = ModelFacts(
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            max_rows=max_rows,
            weight_bytes=self._weight_bytes,
            dtype=loaded.dtype,
            device=self._describe_device(),
            notes=tuple(notes),
            keeps=keeps,
            kv_bytes_per_token=token_bytes,
            identity=identity_of(settings.path, loaded.dtype, self._device.kind, settings.unpack, settings.kv_bits),
            media=self._sight.kinds if self._sight else (),
            whole_media=self._sight is not None and self._model.whole_media,
        )
        return self._warmed(facts)

    def step(self, plan: Plan) -> StepResult:
        """Owner only. Drop, join, launch the decode step, prefill, then read the step before."""
        self._guard.check("step")
        if self._batch is None or self._prompts is None:
            raise ModelError("the model is not loaded")
        batch, prompts = self._batch, self._prompts
        if loaded := [array for order in plan.load for array in self._kept.load(order)]:
            mx.eval(loaded)
        unkept = self._keep(batch, [order for order in plan.keep if order.request_id in batch.ids])
        if plan.drop:
            prompts.drop(plan.drop)
            batch.drop(set(plan.drop))
            if self._sight is not None:
                self._sight.drop(plan.drop)
        joining = [request_id for request_id in plan.decode if request_id not in batch.ids]
        if joining:
            batch.join(*prompts.take(joining))
            if self._sight is not None:
                self._sight.read_through(joining)
            unkept += self._keep(batch, [order for order in plan.keep if order.request_id in joining])
        launched, rows, failed = self._decode(batch)
        read, seen, unfit = self._read_prompts(plan, prompts)
        unkept += [handle for chunk in plan.prefill if chunk.request.request_id in unfit for handle in chunk.keeps]
        if read:
            # With rows decoding, the next read bounds how far Python runs ahead of the device; without, wait here.
            (mx.eval if launched is None else mx.async_eval)(read)
        if plan.forget and (left := self._kept.forget(plan.forget)):
            mx.eval(left)
        rows = self._read(batch) if rows is None else rows
        self._pending = launched
        return StepResult(
            tuple(rows),
            failed=(*failed, *(RowFailure(*each) for each in unfit.items())),
            scores=tuple(prompts.scores()),
            seen=seen,
            unkept=tuple(unkept),
            stored=tuple(self._kept.spool.advance()),
            storing=bool(self._kept.spool),
        )

    def memory_bytes(self) -> int:
        """Owner only. Weights, and the keys and values of rows and of prompts that are being read."""
        self._guard.check("memory_bytes")
        rows = (self._batch.nbytes if self._batch else 0) + (self._prompts.nbytes if self._prompts else 0)
        return self._weight_bytes + rows + self._kept.nbytes + (self._sight.nbytes if self._sight else 0)

    def reset(self) -> None:
        """Owner only. Forget every row; a failed step may have left any of them half written."""
        self._guard.check("reset")
        self._pending = None
        self._kept.clear()
        if self._sight is not None:
            self._sight.clear()
        self._batch, self._prompts = self._fresh()

    def close(self) -> None:
        """Owner only. The last act: everything with a stream inside dies here, on the thread that made it."""
        self._guard.check("close")
        self._pending = self._batch = self._prompts = self._model = self._sight = None
        self._kept.clear()
        gc.collect()
        try:
            mx.synchronize(self._stream)
        finally:
            mx.clear_cache()
            mx.clear_streams()

    def _decode(self, batch: Batch) -> tuple[Launched | None, list[RowOutput] | None, list[RowFailure]]:
        """Launch a step. The last one's rows, if they had to be read for it, and those that cannot go on."""
        if not batch.ids:
            return None, None, []
        logits = batch.forward()
        if not batch.guided:
            return batch.launch(logits), None, []
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        rows = self._read(batch)
        mask, failed = batch.guide(rows)
        return batch.launch(logits, mask), rows, failed

    def _read_prompts(self, plan: Plan, prompts: PromptReader) -> tuple[list[mx.array], Seen, dict[int, str]]:
        """Read the plan's chunks and look at its media: what to evaluate, what was seen, and whose media do not fit."""
        if self._sight is not None:
            return self._sight.step(plan, prompts)
        return prompts.read(plan.prefill), (), {look.request.request_id: BLIND for look in plan.look}

    def _read(self, batch: Batch) -> list[RowOutput]:
        """What the last step gave the rows that are still there. Waits for it."""
        return [] if self._pending is None else self._pending.read(batch.ids)

    def _keep(self, batch: Batch, orders: Sequence[Keep]) -> list[int]:
        """Keep of rows what the orders say. The handles for which that could not be done."""
        copies: list[mx.array] = []
        unkept: list[int] = []
        for order in orders:
            if (arrays := batch.save(order, self._kept)) is None:
                unkept += order.every_handle
            else:
                copies += arrays
        if copies:
            mx.eval(copies)
        return unkept

    def _probe(self) -> tuple[int, KeptSizes | None]:
        """What a token takes in the caches, and what it takes to keep it, measured on one."""
        caches = row_of(self._model, self._packing)
        self._model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        mx.eval(states(caches))
        return bytes_per_token(caches), kept_sizes(caches)

    def _describe_device(self) -> str:
        blas = f", {self._settings.blas}" if self._settings.blas and self._device.is_cpu else ""
        return f"{self._device.kind} ({self._device.name}){blas}"

    def _enabled(self, fast_path: str) -> bool:
        return fast_path not in self._settings.disabled

    def _on_cuda(self) -> bool:
        return self._device.kind == "cuda" and self._enabled("kernel")

    def _lay_out(self) -> None:
        """Put layers into the form that runs fastest here."""
        turn = self._device.is_cpu and pays_here() and self._enabled("turn")
        if self._enabled("fuse"):
            fuse_projections(self._model, turned_layer if turn else lambda layer: layer)
        if turn:
            turn_layers(self._model)
            if not self._settings.like_gpu:
                self._attention = cpu_attention
                exchange_function(self._model, "scaled_dot_product_attention", cpu_attention)

    def _fresh(self) -> tuple[Batch, PromptReader]:
        sight = self._sight
        shift = sight.shift if sight is not None and self._model.positional else None
        make = functools.partial(
            Batch,
            self._model,
            self._vocab_size,
            kernel=self._on_cuda(),
            compiler=self._settings.grammars,
            shift=shift,
        )
        see = sight.read if sight is not None else None
        if not self._slots:
            return make(MergedCaches()), SingleReader(self._model, self._kept, see=see)
        layers = len(new_row(self._model))
        on_cpu = self._device.is_cpu and not self._settings.like_gpu
        policy = exact if on_cpu else powers_of_two
        if self._packing is not None:
            layer = functools.partial(QuantizedSlotLayer, self._packing)
            reader = BlockReader(self._model, layers, fill=None, kept=self._kept, packing=self._packing)
            return make(SlotCaches(layers, policy, wide=False, layer=layer)), reader
        caches = SlotCaches(layers, policy, wide=self._wide)
        # Padding is computed like everything else: almost for nothing on a GPU, for real on the CPU.
        fill = (0.75 if on_cpu else 0.5) if self._enabled("group-prefill") else None
        return make(caches), BlockReader(self._model, layers, fill=fill, kept=self._kept, see=see)

    def _choose(self) -> str | None:
        """Slots for full attention, merged caches for the rest. What stands against batching at all, if anything."""
        if self._settings.kv_bits:
            self._pack(self._settings.kv_bits)
            return None
        caches = new_row(self._model)
        obstacle = unbatchable(caches)
        if obstacle is not None:
            return obstacle
        self._slots = self._enabled("slots") and all_plain(caches)
        on_cuda = self._on_cuda()
        adopts = self._slots and (on_cuda or self._settings.like_gpu)
        self._wide = adopts and adopt_attention(self._model, kernels=on_cuda) == len(caches)
        return "this model" if self._trouble() else None

    def _pack(self, bits: int) -> None:
        """Quantised keys and values: only over slots, and with attention that knows how to read them."""
        self._packing = packing_for(self._model, bits)
        if self._sight is not None:
            raise refusal(bits, "it takes images, and quantised keys and values are for text models")
        if not self._enabled("slots"):
            raise refusal(bits, "it needs slots, and --disable slots leaves them out")
        self._slots = True
        products = products_fit(self._device.kind) and not self._settings.like_gpu
        reads = packed_attention(self._attention, products=products)
        exchange_function(self._model, "scaled_dot_product_attention", reads)
        if trouble := self._trouble():
            raise refusal(bits, f"its attention cannot read quantised keys and values ({trouble})")

    def _trouble(self) -> str | None:
        """Try two rows of unequal length: some models cannot take a batch although their caches can."""
        short, long = Submit(0, (0,), 1), Submit(1, (0, 0, 0), 1)
        try:
            self.reset()
            self.step(Plan(prefill=(Prefill(short, 0, 0), Prefill(long, 0, 2))))
            self.step(Plan(decode=(0, 1)))
            self.step(Plan(decode=(0, 1)))
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            log.warning("the model cannot run two rows at once: %s", error)
            self._slots = self._wide = False
            return str(error)
        return None

    def _warmed(self, facts: ModelFacts) -> ModelFacts:
        """On the CPU nothing is compiled, so there is nothing to warm."""
        if self._device.is_cpu or not self._enabled("warmup"):
            return facts
        started = time.monotonic()
        rehearse(
            self,
            max_rows=facts.max_rows,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
        )
        log.info("warmed up in %.1f s", time.monotonic() - started)
        return facts
