"""Options of the models: when they are loaded, how their output is parsed, and the memory they may use."""

from __future__ import annotations

from pathlib import Path

from millstream.cli.arguments import duration, memory_size, memory_size_or_none, natural
from millstream.cli.config_file import LOAD, REASONING_FORMATS, TOOL_FORMATS
from millstream.cli.serve_options.common import DEFAULTS, Group, with_default
from millstream.config import KV_BITS


def add_models(group: Group) -> None:
    group.add_argument(
        "--load", choices=LOAD, help=with_default("load models at start or at their first use", DEFAULTS.load)
    )
    group.add_argument(
        "--idle-unload",
        type=duration,
        metavar="TIME",
        help=with_default("unload a model after this long without a request, e.g. 10m; 0: never", "never"),
    )
    group.add_argument(
        "--tool-format",
        choices=TOOL_FORMATS,
        metavar="NAME",
        help=with_default(
            f"format of the models' tool calls: {', '.join(TOOL_FORMATS)}; auto: detect it from the chat template "
            "and the vocabulary",
            "auto",
        ),
    )
    group.add_argument(
        "--reasoning-format",
        choices=REASONING_FORMATS,
        metavar="NAME",
        help=with_default(f"markers around the models' reasoning: {', '.join(REASONING_FORMATS)}", "auto"),
    )
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="let control tokens in messages, such as <|im_end|>, act as control tokens (default: they are text)",
    )
    group.add_argument(
        "--cache-dir", type=Path, metavar="FOLDER", help="folder for downloaded models and the prefix cache on disk"
    )


def add_memory(group: Group) -> None:
    group.add_argument(
        "--memory",
        type=memory_size,
        metavar="SIZE",
        help=with_default(
            "memory budget of all models, e.g. 16GB; idle models are unloaded to stay in it", "what the device has"
        ),
    )
    group.add_argument(
        "--prefix-cache-memory",
        type=memory_size_or_none,
        metavar="SIZE",
        help=with_default("prefix cache size per model; 0: no prefix cache", "1GiB"),
    )
    group.add_argument(
        "--prefix-cache-disk",
        type=memory_size_or_none,
        metavar="SIZE",
        help=with_default("prefix cache size per model on disk, below --cache-dir; it survives a restart", "none"),
    )
    group.add_argument(
        "--kv-bits",
        type=natural,
        choices=KV_BITS,
        help=with_default("quantise the KV cache to 8 or 4 bits (models with full attention only); 0: do not", "0"),
    )
