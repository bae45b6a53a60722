"""Options of the engines: batching, where an engine runs, and its fast paths."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import replace

from millstream.cli import toml_tables as toml
from millstream.cli.arguments import fast_path
from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import MILLISECONDS, SWITCH, TIME, Value, choice, integer, listed
from millstream.config import FAST_PATHS, LAYOUTS

ISOLATION = ("auto", "thread", "process")
_POLICIES = ("queue", "fail-fast")


def _fast_path(text: str) -> str:
    name = fast_path(text)
    if name not in FAST_PATHS:
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(sorted(FAST_PATHS))}")
    return name


def _fast_paths(value: object) -> tuple[str, ...]:
    return tuple(map(_fast_path, toml.strings(value)))


_FAST_PATH = Value(_fast_path, toml.string, "a fast path", metavar="PATH", choices=tuple(sorted(FAST_PATHS)))

BATCHING = (
    Option("max_batch", integer(1, metavar="ROWS"), "most requests that decode in one batch"),
    Option("queue", integer(0), "most requests that may wait for a place in the batch"),
    Option(
        "policy",
        choice(*_POLICIES),
        "when the batch is full: let requests wait, or answer 503 at once",
        setting="fail_fast",
        to_field=lambda policy: policy == "fail-fast",
        own_default="queue",
    ),
    Option(
        "prefill_chunk",
        integer(1, metavar="TOKENS"),
        "most prompt tokens per request and step while other requests decode",
        default_text="measured at load",
    ),
    Option(
        "max_token_gap",
        MILLISECONDS,
        "longest time between two tokens of a stream, in milliseconds, that reading other prompts may cause while "
        "prompts wait; prompts are read faster with longer gaps. A device that cannot keep it, such as a CPU, takes "
        "2.5 decode steps, and more if prompts wait for seconds",
    ),
)

ENGINE = (
    Option(
        "isolation",
        choice(*ISOLATION),
        "run each engine on a thread of the server or in its own process; auto: process with more than 2 cores",
    ),
    Option("step_timeout", TIME, "replace an engine whose step takes longer than this; 0: never"),
    Option(
        "device",
        choice("auto", "cpu"),
        "cpu: do not use the GPU",
        to_field=lambda device: None if device == "auto" else device,
        default_text="auto",
    ),
)

FAST = (
    Option(
        "blas",
        SWITCH,
        "Linux CPU: use an optimised BLAS; --no-blas: MLX's own, which is slow",
        default_text="yes",
    ),
    Option(
        "unpack",
        SWITCH,
        "CPU: convert quantised and half-precision weights to float32, which is faster and takes more memory",
        default_text="yes",
    ),
    Option(
        "disable",
        replace(listed(_FAST_PATH, _fast_paths, "a list of fast paths")),
        "disable a fast path; repeatable. " + "; ".join(f"{name}: {text}" for name, text in FAST_PATHS.items()),
        default_text="none",
        setting="disabled",
        to_field=frozenset,
        own_default=(),
    ),
    Option(
        "layout",
        choice(*LAYOUTS),
        "an experiment: keep keys and values of all rows in arenas with a position map, without kernels; arena-built: "
        "give each step to the device when the last one is read",
    ),
)
