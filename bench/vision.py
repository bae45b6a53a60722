"""Measure inter-token latency of text rows while images are encoded, and the cost of text alone on a vision model
compared with the same language model without vision. Runs in process, over the engine's link.

python bench/vision.py
python bench/vision.py --width 1024 --layers 16 --depth 24 --side 64
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.backend.environment import load_blas
from millstream.bench.report import milliseconds, percentile
from millstream.engine.generation.messages import Generate, Tokens
from millstream.engine.generation.plan import EncodeMedia, GenerationBackend
from millstream.engine.generation.scheduler import GenerationScheduler
from millstream.engine.generation.tuning import SchedulerSettings, make_scheduler
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Event, Finished, Loaded, LoadFailed, Shutdown, Stopped, expanded
from millstream.model_facts import GenerationFacts
from millstream.types import Media, Tensor

VOCAB, IMAGE, START, END = 2048, 2000, 2001, 2002
ROWS = 4
PATCH = 14


class AtOnce(GenerationScheduler):
    """For comparison: encodes an image in one step, however long that takes."""

    def _encode(self) -> tuple[EncodeMedia, ...]:
        return tuple(dataclasses.replace(order, tokens=10**9) for order in super()._encode())


def language(width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(1, width // 256),
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16384,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


def write(folder: Path, config: dict[str, Any], model: Any) -> Path:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vision_model(folder: Path, width: int, layers: int, depth: int) -> Path:
    """A Qwen2.5-VL with random weights."""
    from mlx_vlm.models import qwen2_5_vl
    from mlx_vlm.utils import update_module_configs

    config = {
        **language(width, layers),
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 8, 8]},
        "image_token_id": IMAGE,
        "video_token_id": END + 1,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "out_hidden_size": width,
            "num_heads": width // 64,
            "patch_size": PATCH,
            "fullatt_block_indexes": list(range(3, depth, 4)),
        },
    }
    given = json.loads(json.dumps(config))
    settings = qwen2_5_vl.ModelConfig.from_dict(given)
    settings = update_module_configs(settings, qwen2_5_vl, given, ["text", "vision"])
    return write(folder, config, qwen2_5_vl.Model(settings))


def text_model(folder: Path, width: int, layers: int) -> Path:
    """Its language model alone, in mlx-lm's form."""
    from mlx_lm.models import qwen2

    config = {**language(width, layers), "model_type": "qwen2"}
    return write(folder, config, qwen2.Model(qwen2.ModelArgs.from_dict(config)))


def backend(folder: Path, blas: str | None) -> GenerationBackend:
    from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend

    return MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=8, blas=blas))


def scheduler(kind: type[GenerationScheduler], facts: GenerationFacts) -> GenerationScheduler:
    made = make_scheduler(SchedulerSettings(), facts)
    made.__class__ = kind
    return made


class Engine:
    """An engine on a thread. Records when tokens of each request arrive."""

    def __init__(self, folder: Path, kind: type[GenerationScheduler], blas: str | None) -> None:
        self._link = ThreadLink("bench", functools.partial(backend, folder, blas), functools.partial(scheduler, kind))
        self._events: queue.Queue[tuple[float, Sequence[Event]]] = queue.Queue()
        self.times: dict[int, list[float]] = {}
        self.ended: dict[int, float] = {}
        self._ready = self._stopped = False
        self._link.start_soon(lambda events: self._events.put((time.monotonic(), events)))
        self.wait(lambda: self._ready)

    def post(self, submit: Generate) -> None:
        self._link.post_soon(submit)

    def wait(self, condition: Any) -> None:
        while not condition():
            now, events = self._events.get(timeout=600)
            for event in expanded(events):
                match event:
                    case Tokens():
                        self.times.setdefault(event.request_id, []).append(now)
                    case Finished():
                        self.ended[event.request_id] = now
                    case Loaded():
                        self._ready = True
                    case LoadFailed():
                        raise SystemExit(event.message)
                    case Stopped():
                        self._stopped = True

    def stop(self) -> None:
        self._link.post_soon(Shutdown())
        self.wait(lambda: self._stopped)
        self._link.join(60)


def image(number: int, side: int) -> tuple[list[int], Media]:
    """A random image of `side` times `side` patches, with a quarter as many tokens."""
    pixels = np.random.default_rng(number).normal(size=(side * side, 3 * 2 * PATCH * PATCH)).astype(np.float32)
    grid = np.array([[1, side, side]], dtype=np.int64)
    tensors = (
        ("pixel_values", Tensor("float32", pixels.shape, pixels.tobytes())),
        ("image_grid_thw", Tensor("int64", grid.shape, grid.tobytes())),
    )
    tokens = [IMAGE] * (side * side // 4)
    return [5, START, *tokens, END, 6, 7], Media("image", 2, len(tokens), f"image {number}", tensors)


def ask(engine: Engine, number: int, side: int, digest: int) -> float:
    """Time to first token of a request with an image."""
    tokens, media = image(digest, side)
    started = time.monotonic()
    engine.post(Generate(number, tuple(tokens), 2, media=(media,), contents=((2, media.digest),)))
    engine.wait(lambda: number in engine.ended)
    return engine.times[number][0] - started


def during_images(
    folder: Path, kind: type[GenerationScheduler], name: str, arguments: argparse.Namespace, blas: str | None
) -> None:
    engine = Engine(folder, kind, blas)
    ask(engine, 900, arguments.side, 900)  # the first request compiles kernels
    for row in range(ROWS):
        engine.post(Generate(row, (3, 4, 5, row + 1), 1_000_000))
    engine.wait(lambda: all(len(engine.times.get(row, [])) >= 60 for row in range(ROWS)))
    begun = time.monotonic()
    firsts = [ask(engine, 100 + number, arguments.side, number) for number in range(arguments.images)]
    over = time.monotonic()
    again = [ask(engine, 200 + number, arguments.side, number) for number in range(arguments.images)]
    engine.stop()
    rows = [engine.times[row] for row in range(ROWS)]
    quiet = [b - a for times in rows for a, b in itertools.pairwise(times) if b < begun][ROWS * 10 :]
    busy = [b - a for times in rows for a, b in itertools.pairwise(times) if begun < b < over]
    print(
        f"{name}: gap alone p50 {milliseconds(percentile(quiet, 0.5))}, p99 {milliseconds(percentile(quiet, 0.99))}; "
        f"during images p50 {milliseconds(percentile(busy, 0.5))}, p99 {milliseconds(percentile(busy, 0.99))}, "
        f"worst {milliseconds(percentile(busy, 1.0))}; "
        f"first token with an image {milliseconds(percentile(firsts, 0.5))}, "
        f"repeated {milliseconds(percentile(again, 0.5))}"
    )


def text_alone(folder: Path, name: str, blas: str | None) -> None:
    """Prefill and decode without images."""
    engine = Engine(folder, GenerationScheduler, blas)
    for rounds in range(2):
        started = time.monotonic()
        first = 1000 * rounds
        for row in range(ROWS):
            engine.post(Generate(first + row, tuple((row + position) % 1000 for position in range(300)), 200))
        engine.wait(lambda first=first: all(first + row in engine.ended for row in range(ROWS)))
    spent = time.monotonic() - started
    rows = [engine.times[1000 + row] for row in range(ROWS)]
    gaps = [b - a for times in rows for a, b in itertools.pairwise(times)]
    engine.stop()
    print(f"{name}: {ROWS} rows of 300 + 200 tokens in {spent:.2f} s, gap p50 {milliseconds(percentile(gaps, 0.5))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--depth", type=int, default=12, help="blocks of the vision tower")
    parser.add_argument("--side", type=int, default=32, help="patches per side of an image; a multiple of 8")
    parser.add_argument("--images", type=int, default=5)
    arguments = parser.parse_args()
    blas = load_blas()
    with tempfile.TemporaryDirectory() as root:
        folder = vision_model(Path(root) / "vision", arguments.width, arguments.layers, arguments.depth)
        during_images(folder, GenerationScheduler, "in slices", arguments, blas)
        during_images(folder, AtOnce, "at once  ", arguments, blas)
        text_alone(text_model(Path(root) / "text", arguments.width, arguments.layers), "text model  ", blas)
        text_alone(folder, "vision model", blas)
    return 0


if __name__ == "__main__":
    sys.exit(main())
