"""Options of the engines: batching, where an engine runs, and its fast paths."""

from __future__ import annotations

from millstream.cli.arguments import duration, fast_path, milliseconds, natural, positive
from millstream.cli.config_file import ISOLATION
from millstream.cli.serve_options.common import DEFAULTS, Group, with_default
from millstream.config import FAST_PATHS


def add_batching(group: Group) -> None:
    group.add_argument(
        "--max-batch",
        type=positive,
        metavar="ROWS",
        help=with_default("most requests that decode in one batch", DEFAULTS.max_batch),
    )
    group.add_argument(
        "--queue",
        type=natural,
        metavar="COUNT",
        help=with_default("most requests that may wait for a place in the batch", DEFAULTS.queue),
    )
    group.add_argument(
        "--policy",
        choices=("queue", "fail-fast"),
        default="queue",
        help=with_default("when the batch is full: let requests wait, or answer 503 at once", "queue"),
    )
    group.add_argument(
        "--prefill-chunk",
        type=positive,
        metavar="TOKENS",
        help=with_default("most prompt tokens per request and step while other requests decode", "measured at load"),
    )
    group.add_argument(
        "--max-token-gap",
        type=milliseconds,
        metavar="MS",
        help=with_default(
            "longest time between two tokens of a stream, in milliseconds, that reading other prompts may cause while "
            "prompts wait; prompts are read faster with longer gaps",
            f"{DEFAULTS.max_token_gap:g}",
        ),
    )


def add_engine(group: Group) -> None:
    group.add_argument(
        "--isolation",
        choices=ISOLATION,
        help=with_default(
            "run each engine on a thread of the server or in its own process; auto: process with more than 2 cores",
            DEFAULTS.isolation,
        ),
    )
    group.add_argument(
        "--step-timeout",
        type=duration,
        metavar="TIME",
        help=with_default(
            "replace an engine whose step takes longer than this many seconds; 0: never", f"{DEFAULTS.step_timeout:g}"
        ),
    )
    group.add_argument("--device", choices=("cpu",), help="cpu: do not use the GPU")


def add_fast_paths(group: Group) -> None:
    group.add_argument(
        "--no-blas", action="store_false", dest="blas", help="Linux CPU: use MLX's own BLAS, which is slow"
    )
    group.add_argument(
        "--no-unpack",
        action="store_false",
        dest="unpack",
        help="CPU: do not convert quantised and half-precision weights to float32",
    )
    group.add_argument(
        "--disable",
        type=fast_path,
        action="append",
        choices=sorted(FAST_PATHS),
        default=[],
        metavar="PATH",
        help="disable a fast path; repeatable. " + "; ".join(f"{name}: {text}" for name, text in FAST_PATHS.items()),
    )
