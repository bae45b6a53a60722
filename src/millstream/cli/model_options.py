"""The options of one model, below [models.NAME] in the config file: the one table of them."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.cli import toml_tables as toml
from millstream.cli.serve_options.engine import ISOLATION
from millstream.cli.serve_options.models import LOAD_TIMES, MAX_DEPTH, REASONING_FORMATS, TOOL_FORMATS
from millstream.cli.serve_options.values import MAX_COUNT
from millstream.cli.toml_tables import Reader
from millstream.config import KV_BITS, MODEL_KINDS, NO_DRAFT, SPECULATION
from millstream.parameters import MODEL_DEFAULTS, Parameter

_INT32 = 2**31 - 1
_SERVER = "the server's"


@dataclass(frozen=True, slots=True)
class ModelOption:
    name: str
    read: Reader
    accepts: str
    help: str
    default_text: str = "none"


def _unchanged(value: object) -> object:
    """For nested tables, which have readers of their own."""
    return value


def _sampling(row: Parameter) -> ModelOption:
    if row.kind == "integer":
        return ModelOption(row.name, toml.integer(int(row.low), int(row.high)), f"an integer from {row.low}", row.help)
    return ModelOption(row.name, toml.number(row.low, row.high), f"{row.low} to {row.high}", row.help)


_MODEL = (
    ModelOption(
        "source",
        toml.string,
        "text",
        'a folder, a .gguf file, a hub id (org/name, org/name@revision) or "demo"',
        "must be set",
    ),
    ModelOption(
        "kind", toml.choice(*MODEL_KINDS), ", ".join(MODEL_KINDS), "what to use it for", "found from its files"
    ),
    ModelOption("alias", toml.string_or_strings, "a name or a list of names", "more names in requests"),
    ModelOption(
        "pin", toml.boolean, "true or false", "never unload it, neither to free memory nor when it is idle", "false"
    ),
    ModelOption(
        "load", toml.choice(*LOAD_TIMES), ", ".join(LOAD_TIMES), "load it at start or at its first use", _SERVER
    ),
    ModelOption(
        "idle_unload",
        toml.time_span,
        "a time such as 10m",
        "unload it after this long without a request; 0: never",
        _SERVER,
    ),
    ModelOption("max_tokens", toml.integer(1, _INT32), "an integer from 1", "for requests that set none"),
    ModelOption("sampling", _unchanged, "a table", "defaults for requests that leave a field out; see below"),
    ModelOption(
        "max_batch", toml.integer(1, MAX_COUNT), "an integer from 1", "most requests that decode in one batch", _SERVER
    ),
    ModelOption(
        "isolation", toml.choice(*ISOLATION), ", ".join(ISOLATION), "run its engine on a thread or a process", _SERVER
    ),
    ModelOption(
        "kv_memory",
        toml.size,
        "a size such as 2GiB",
        "KV cache size, if the server has a memory budget",
        "enough for one row of the context, up to 32768 tokens",
    ),
    ModelOption(
        "kv_bits", toml.integer_choice(*KV_BITS), ", ".join(map(str, KV_BITS)), "quantise its KV cache", _SERVER
    ),
    ModelOption(
        "speculation",
        toml.choice(*SPECULATION),
        ", ".join(SPECULATION),
        "draft tokens and verify several at a time where it pays",
        _SERVER,
    ),
    ModelOption(
        "draft",
        toml.string,
        "text",
        f'its draft model, a smaller one with the same vocabulary: as source; "{NO_DRAFT}" for none',
        _SERVER,
    ),
    ModelOption(
        "draft_depth",
        toml.integer(1, MAX_DEPTH),
        f"an integer from 1 to {MAX_DEPTH}",
        "most tokens that the draft model drafts at once",
        _SERVER,
    ),
    ModelOption(
        "spec_prefill",
        toml.number(0, 1, exclusive_low=True),
        "above 0, to 1",
        "read only this share of long prompts, which the draft model chooses: lossy",
        _SERVER,
    ),
    ModelOption("tool_format", toml.choice(*TOOL_FORMATS), "as --tool-format", "the format of its tool calls", _SERVER),
    ModelOption(
        "reasoning_format",
        toml.choice(*REASONING_FORMATS),
        "as --reasoning-format",
        "the markers around its reasoning",
        _SERVER,
    ),
    ModelOption(
        "allow_special_tokens",
        toml.boolean,
        "true or false",
        "let control tokens in messages act as control tokens",
        _SERVER,
    ),
)

MODEL_OPTIONS = {option.name: option for option in _MODEL}
SAMPLING_OPTIONS = {row.name: _sampling(row) for row in MODEL_DEFAULTS}
