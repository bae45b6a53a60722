"""Options of the models: when they are loaded, how their output is parsed, and the memory they may use."""

from __future__ import annotations

from dataclasses import replace

from millstream.cli.serve_options.option import Option
from millstream.cli.serve_options.values import (
    PATH,
    SIZE,
    SIZE_OR_NONE,
    SWITCH,
    TEXT,
    TIME,
    choice,
    integer,
    integer_choice,
)
from millstream.config import KV_BITS, SPECULATION
from millstream.text.chat_format import AUTO, NONE, REASONING
from millstream.text.tool_formats.registry import FORMATS

LOAD_TIMES = ("start", "use")
TOOL_FORMATS = (AUTO, NONE, *FORMATS)
MAX_DEPTH = 16
"""A pass has at most one token more per row."""
REASONING_FORMATS = (AUTO, NONE, *REASONING)

LOADING = (
    Option("load", choice(*LOAD_TIMES), "load models at start or at their first use"),
    Option(
        "idle_unload",
        TIME,
        "unload a model after this long without a request, e.g. 10m; 0: never",
        default_text="never",
    ),
    Option(
        "cache_dir",
        PATH,
        "folder for downloaded models, the prefix cache on disk and compiled kernels",
        default_text="the hub's own cache, and Millstream's for the rest",
    ),
)

FORMATS_OF_OUTPUT = (
    Option(
        "tool_format",
        choice(*TOOL_FORMATS, metavar="NAME"),
        f"format of the models' tool calls: {', '.join(TOOL_FORMATS)}; auto: detect it from the chat template and the "
        "vocabulary",
    ),
    Option(
        "reasoning_format",
        choice(*REASONING_FORMATS, metavar="NAME"),
        f"markers around the models' reasoning: {', '.join(REASONING_FORMATS)}",
    ),
    Option(
        "allow_special_tokens",
        SWITCH,
        "let control tokens in messages, such as <|im_end|>, act as control tokens",
        default_text="no, they are text",
    ),
)

BUDGET = (
    Option(
        "memory",
        SIZE,
        "memory budget of all models, e.g. 16GB; idle models are unloaded to stay in it",
        default_text="what the device has",
    ),
)

SPECULATIVE = (
    Option(
        "speculation",
        choice(*SPECULATION),
        "draft tokens and verify several at a time, which never changes an answer; auto: where it is faster",
    ),
    Option(
        "draft",
        replace(TEXT, metavar="MODEL", accepts="a folder, a .gguf file or a hub id"),
        "draft model: a smaller one with the same vocabulary, which the same engine loads; for models that set none in "
        "the file",
        default_text="none",
    ),
    Option(
        "draft_depth",
        integer(1, MAX_DEPTH, metavar="TOKENS"),
        "most tokens that a draft model drafts at once",
        default_text="as many as pay",
    ),
)

CACHES = (
    Option(
        "prefix_cache_memory",
        SIZE_OR_NONE,
        "prefix cache size per model; 0: no prefix cache",
        default_text="an eighth of what the weights leave, at least 1GiB",
    ),
    Option(
        "prefix_cache_disk",
        SIZE_OR_NONE,
        "prefix cache size per model on disk, below --cache-dir; it survives a restart",
        default_text="none",
    ),
    Option(
        "kv_bits",
        integer_choice(*KV_BITS),
        "quantise the KV cache to 8 or 4 bits (models with full attention only); 0: do not",
    ),
)
