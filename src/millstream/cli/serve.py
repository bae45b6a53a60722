"""`millstream serve`: run the server until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from millstream.cli.arguments import natural, port, positive, seconds
from millstream.config import FAST_PATHS, Settings
from millstream.errors import MillstreamError
from millstream.server import serve

DEFAULTS = Settings()


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serve models over OpenAI's API. Without MODEL: the demo model, SmolLM2-135M-Instruct.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a folder, a .gguf file or a hub id (org/name)")
    network = parser.add_argument_group("network")
    network.add_argument("--host", default=DEFAULTS.host, help="address to listen on")
    network.add_argument("--port", type=port, default=DEFAULTS.port, help="port; 0 takes a free one")
    network.add_argument(
        "--body-limit", type=positive, default=DEFAULTS.body_limit, metavar="BYTES", help="largest request body"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-batch", type=positive, default=DEFAULTS.max_batch, help="rows that decode together")
    engine.add_argument("--queue", type=natural, default=DEFAULTS.queue, help="requests that may wait for a row")
    engine.add_argument(
        "--policy",
        choices=("queue", "fail-fast"),
        default="queue",
        help="when all rows are taken: let requests wait, or answer 503 at once",
    )
    engine.add_argument(
        "--prefill-chunk",
        type=positive,
        default=None,
        metavar="TOKENS",
        help="tokens of one prompt that a step reads beside running rows; None: 128 on the CPU, 256 on a GPU",
    )
    engine.add_argument("--device", choices=("cpu",), default=None, help="keep off the GPU")
    engine.add_argument(
        "--isolation",
        choices=("auto", "thread", "process"),
        default=DEFAULTS.isolation,
        help="run each engine on a thread of the server or in a process of its own; auto: process with over 2 cores",
    )
    engine.add_argument("--no-blas", action="store_true", help="Linux CPU: keep MLX's own, slow BLAS")
    engine.add_argument("--no-unpack", action="store_true", help="CPU: keep quantised and half weights as they are")
    engine.add_argument(
        "--disable",
        action="append",
        choices=sorted(FAST_PATHS),
        default=[],
        metavar="PATH",
        help="leave out a fast path, repeatable. " + "; ".join(f"{name}: {text}" for name, text in FAST_PATHS.items()),
    )
    other = parser.add_argument_group("other")
    other.add_argument(
        "--grace", type=seconds, default=DEFAULTS.grace, metavar="SECONDS", help="for running requests after SIGTERM"
    )
    other.add_argument("--cache-dir", type=Path, default=None, help="where fetched models are kept")
    other.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="log this and worse"
    )


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        code, clean = serve(_settings(arguments))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    if not clean:
        # Something still hangs in native code or in a download: waiting for its thread would hang the exit too.
        logging.shutdown()
        os._exit(code)
    return code


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        models=tuple(arguments.models),
        host=arguments.host,
        port=arguments.port,
        max_batch=arguments.max_batch,
        queue=arguments.queue,
        fail_fast=arguments.policy == "fail-fast",
        prefill_chunk=arguments.prefill_chunk,
        body_limit=arguments.body_limit,
        grace=arguments.grace,
        device=arguments.device,
        isolation=arguments.isolation,
        blas=not arguments.no_blas,
        unpack=not arguments.no_unpack,
        disabled=frozenset(arguments.disable),
        cache_dir=arguments.cache_dir,
    )
