"""`millstream serve`: run the server until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from millstream.cli.arguments import (
    duration,
    host_name,
    memory_size,
    memory_size_or_none,
    natural,
    origin,
    port,
    positive,
    seconds,
)
from millstream.cli.models_file import ISOLATION, LOAD, REASONING_FORMATS, TOOL_FORMATS
from millstream.cli.settings import KEY_VARIABLE, settings_of
from millstream.config import FAST_PATHS, KV_BITS, Settings
from millstream.errors import MillstreamError
from millstream.server import serve

DEFAULTS = Settings()

Group = argparse._ArgumentGroup


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Options that the file of `--config` has too get no default here: `settings_of` must see which were given."""
    parser = commands.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serve models over OpenAI's API. Without any model: the demo model, SmolLM2-135M-Instruct.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "models", nargs="*", default=[], metavar="MODEL", help="a folder, a .gguf file or a hub id (org/name)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=None,
        metavar="FILE",
        help="TOML file with models and options; options given here win, models given here come first",
    )
    _add_network(parser.add_argument_group("network"))
    _add_access(parser.add_argument_group("access"))
    _add_models(parser.add_argument_group("models"))
    _add_engine(parser.add_argument_group("engine"))
    _add_media(parser.add_argument_group("images and other media"))
    _add_fast_paths(parser.add_argument_group("fast paths"))
    _add_other(parser.add_argument_group("other"))


def _add_network(group: Group) -> None:
    group.add_argument("--host", help=_help("address to listen on", DEFAULTS.host))
    group.add_argument("--port", type=port, help=_help("port; 0 takes a free one", DEFAULTS.port))
    group.add_argument(
        "--body-limit", type=positive, metavar="BYTES", help=_help("largest request body", DEFAULTS.body_limit)
    )
    group.add_argument(
        "--max-connections",
        type=positive,
        metavar="COUNT",
        help=_help(
            "connections at once; beyond, idle ones are closed, then new ones refused", DEFAULTS.max_connections
        ),
    )
    group.add_argument(
        "--header-timeout",
        type=duration,
        metavar="TIME",
        help=_help("for the headers of a request; 0: for ever", f"{DEFAULTS.header_timeout:g}s"),
    )
    group.add_argument(
        "--body-timeout",
        type=duration,
        metavar="TIME",
        help=_help("without a byte of its body; 0: for ever", f"{DEFAULTS.body_timeout:g}s"),
    )
    group.add_argument(
        "--write-timeout",
        type=duration,
        metavar="TIME",
        help=_help("a client that takes nothing for so long is left; 0: never", f"{DEFAULTS.write_timeout:g}s"),
    )
    group.add_argument(
        "--unread-output",
        type=memory_size,
        metavar="SIZE",
        help=_help("what may wait of an answer whose client does not read it; over that it is ended", "8MiB"),
    )


def _add_access(group: Group) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="requests must carry this key, or another one given; repeatable. Other users of this machine can see it: "
        f"--api-key-file and the variable {KEY_VARIABLE} are safer (default: none, the API is open)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="such keys, one a line; lines that begin with # are skipped",
    )
    group.add_argument(
        "--cors-origin",
        type=origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call the API, as in http://localhost:3000; * for all; repeatable",
    )
    group.add_argument(
        "--allowed-host",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests for this host name too, as behind a proxy; * for any; repeatable (default: on a loopback "
        "address loopback names only, else any)",
    )


def _add_models(group: Group) -> None:
    group.add_argument(
        "--memory",
        type=memory_size,
        metavar="SIZE",
        help=_help("what all models together may take, as in 16GB; idle ones are unloaded to make room", "no bound"),
    )
    group.add_argument(
        "--load", choices=LOAD, help=_help("load models with the server or on their first use", DEFAULTS.load)
    )
    group.add_argument(
        "--idle-unload",
        type=duration,
        metavar="TIME",
        help=_help("unload a model after this long without a request, as in 10m; 0: never", "never"),
    )
    group.add_argument(
        "--prefix-cache-memory",
        type=memory_size_or_none,
        metavar="SIZE",
        help=_help("what each model may take for beginnings of prompts that it need not read again; 0: none", "1GiB"),
    )
    group.add_argument(
        "--prefix-cache-disk",
        type=memory_size_or_none,
        metavar="SIZE",
        help=_help("the same on disk, below --cache-dir: it outlives the server; 0: none", "none"),
    )
    group.add_argument(
        "--kv-bits",
        type=natural,
        choices=KV_BITS,
        help=_help("keep keys and values in 8 or 4 bits; for models with full attention only. 0: as they are", "0"),
    )
    group.add_argument(
        "--tool-format",
        choices=TOOL_FORMATS,
        metavar="NAME",
        help=_help(
            f"how models write calls of functions: {', '.join(TOOL_FORMATS)}; auto: by template and vocabulary", "auto"
        ),
    )
    group.add_argument(
        "--reasoning-format",
        choices=REASONING_FORMATS,
        metavar="NAME",
        help=_help(f"the marks around a model's thoughts: {', '.join(REASONING_FORMATS)}", "auto"),
    )
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="let control tokens in messages, such as <|im_end|>, act as control tokens (default: they are text)",
    )
    group.add_argument("--cache-dir", type=Path, help="where fetched models and beginnings of prompts are kept")


def _add_engine(group: Group) -> None:
    group.add_argument("--max-batch", type=positive, help=_help("rows that decode together", DEFAULTS.max_batch))
    group.add_argument("--queue", type=natural, help=_help("requests that may wait for a row", DEFAULTS.queue))
    group.add_argument(
        "--policy",
        choices=("queue", "fail-fast"),
        default="queue",
        help=_help("when all rows are taken: let requests wait, or answer 503 at once", "queue"),
    )
    group.add_argument(
        "--prefill-chunk",
        type=positive,
        metavar="TOKENS",
        help=_help("tokens of one prompt that a step reads beside running rows", "128 on the CPU, 256 on a GPU"),
    )
    group.add_argument(
        "--step-timeout",
        type=duration,
        metavar="SECONDS",
        help=_help("a step that takes longer is taken for hung; 0: wait for ever", f"{DEFAULTS.step_timeout:g}"),
    )
    group.add_argument(
        "--isolation",
        choices=ISOLATION,
        help=_help(
            "run each engine on a thread of the server or in a process of its own; auto: process with over 2 cores",
            DEFAULTS.isolation,
        ),
    )
    group.add_argument("--device", choices=("cpu",), help="keep off the GPU")


def _add_media(group: Group) -> None:
    group.add_argument(
        "--media-folder",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="let requests name files below this folder; repeatable (default: none)",
    )
    group.add_argument(
        "--media-bytes", type=memory_size, metavar="SIZE", help=_help("largest image or other file", "20MiB")
    )
    group.add_argument(
        "--media-pixels", type=positive, metavar="COUNT", help=_help("largest image", DEFAULTS.media_pixels)
    )
    group.add_argument(
        "--media-count", type=natural, metavar="COUNT", help=_help("files of one request", DEFAULTS.media_count)
    )
    group.add_argument(
        "--media-timeout",
        type=duration,
        metavar="SECONDS",
        help=_help("for fetching one of them, and for decoding a video", f"{DEFAULTS.media_timeout:g}"),
    )
    group.add_argument(
        "--media-seconds",
        type=duration,
        metavar="SECONDS",
        help=_help("longest sound; a model may take less", f"{DEFAULTS.media_seconds:g}"),
    )
    group.add_argument(
        "--media-memory",
        type=memory_size,
        metavar="SIZE",
        help=_help("what the media of all requests may take; more of them wait, or get a 503", "1GiB"),
    )
    group.add_argument(
        "--allow-private-media",
        action="store_true",
        help="fetch from addresses that are not public too: whoever can send requests can then reach your network",
    )


def _add_fast_paths(group: Group) -> None:
    group.add_argument("--no-blas", action="store_false", dest="blas", help="Linux CPU: keep MLX's own, slow BLAS")
    group.add_argument(
        "--no-unpack", action="store_false", dest="unpack", help="CPU: keep quantised and half weights as they are"
    )
    group.add_argument(
        "--disable",
        action="append",
        choices=sorted(FAST_PATHS),
        default=[],
        metavar="PATH",
        help="leave out a fast path, repeatable. " + "; ".join(f"{name}: {text}" for name, text in FAST_PATHS.items()),
    )


def _add_other(group: Group) -> None:
    group.add_argument(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        help=_help("for running requests after SIGTERM", f"{DEFAULTS.grace:g}"),
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help=_help("log this and worse", "info"),
    )


def _help(text: str, default: object) -> str:
    return f"{text} (default: {default})"


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        code, clean = serve(settings_of(arguments))
    except MillstreamError as error:
        print(f"millstream: {error.message}", file=sys.stderr)
        return 1
    if not clean:
        # Something still hangs in native code or in a download: waiting for its thread would hang the exit too.
        logging.shutdown()
        os._exit(code)
    return code
