"""Read the TOML file of `--config`: the models to serve, each with its own options, and options of the server.

[server]
memory = "16GB"

[models.small]
source = "mlx-community/Qwen3-0.6B-4bit"
alias = ["tiny"]
pin = true

[models.small.sampling]
temperature = 0.7

[mcp.servers.files]
command = "my-file-server"
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.cli import toml_tables as toml
from millstream.cli.mcp_tables import read_tool_servers
from millstream.cli.toml_tables import Reader, joined, read_table, read_toml
from millstream.config import KV_BITS, ModelSpec, ToolServerSpec
from millstream.errors import ModelError
from millstream.text.chat_format import AUTO, NONE, REASONING
from millstream.text.tool_formats.registry import FORMATS

LOAD = ("start", "use")
ISOLATION = ("auto", "thread", "process")
DEMO_SOURCE = "demo"
TOOL_FORMATS = (AUTO, NONE, *FORMATS)
REASONING_FORMATS = (AUTO, NONE, *REASONING)

_INT32 = 2**31 - 1
_MAX_COUNT = 2**40
_PATHS = {"api_key_file", "store_dir"}
_RELATIVE = ("./", "../", ".\\", "..\\")


def _unchanged(value: object) -> object:
    """For nested tables, which have readers of their own."""
    return value


def _top_k(value: object) -> int:
    """As in the API, -1 means the same as 0: no limit."""
    return max(0, int(toml.integer(-1, _INT32)(value)))


SAMPLING: dict[str, Reader] = {
    "temperature": toml.number(0, 2),
    "top_p": toml.number(0, 1, exclusive_low=True),
    "top_k": _top_k,
    "min_p": toml.number(0, 1),
    "repetition_penalty": toml.number(0, 10, exclusive_low=True),
    "presence_penalty": toml.number(-2, 2),
    "frequency_penalty": toml.number(-2, 2),
}
"""The same ranges as in `api/openai/schema.py`; a test compares them."""

MODEL: dict[str, Reader] = {
    "source": toml.string,
    "alias": toml.string_or_strings,
    "pin": toml.boolean,
    "load": toml.choice(*LOAD),
    "idle_unload": toml.time_span,
    "max_batch": toml.integer(1, _MAX_COUNT),
    "isolation": toml.choice(*ISOLATION),
    "kv_memory": toml.size,
    "kv_bits": toml.integer_choice(*KV_BITS),
    "max_tokens": toml.integer(1, _INT32),
    "tool_format": toml.choice(*TOOL_FORMATS),
    "reasoning_format": toml.choice(*REASONING_FORMATS),
    "allow_special_tokens": toml.boolean,
    "sampling": _unchanged,
}

SERVER: dict[str, Reader] = {
    "host": toml.string,
    "port": toml.integer(0, 65535),
    "memory": toml.size,
    "prefix_cache_memory": toml.size_or_none,
    "prefix_cache_disk": toml.size_or_none,
    "kv_bits": toml.integer_choice(*KV_BITS),
    "load": toml.choice(*LOAD),
    "idle_unload": toml.time_span,
    "step_timeout": toml.time_span,
    "unread_output": toml.size,
    "write_timeout": toml.time_span,
    "isolation": toml.choice(*ISOLATION),
    "max_batch": toml.integer(1, _MAX_COUNT),
    "queue": toml.integer(0, _MAX_COUNT),
    "max_token_gap": toml.number(1, 60_000),
    "tool_format": toml.choice(*TOOL_FORMATS),
    "reasoning_format": toml.choice(*REASONING_FORMATS),
    "allow_special_tokens": toml.boolean,
    "api_keys": toml.strings,
    "api_key_file": toml.string,
    "cors_origins": toml.origins,
    "allowed_hosts": toml.host_names,
    "max_connections": toml.integer(1, _MAX_COUNT),
    "header_timeout": toml.time_span,
    "body_timeout": toml.time_span,
    "media_folders": toml.strings,
    "media_bytes": toml.size,
    "media_pixels": toml.integer(1, _MAX_COUNT),
    "media_count": toml.integer(0, _MAX_COUNT),
    "media_timeout": toml.time_span,
    "media_seconds": toml.time_span,
    "media_memory": toml.size,
    "allow_private_media": toml.boolean,
    "store_dir": toml.string,
    "store_size": toml.size,
    "store_age": toml.time_span,
    "log_content": toml.boolean,
    "otel": toml.boolean,
}


TOP: dict[str, Reader] = {"models": _unchanged, "server": _unchanged, "mcp": _unchanged}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The contents of a config file."""

    models: tuple[ModelSpec, ...] = ()
    server: dict[str, Any] = field(default_factory=dict)
    """Fields of `Settings`, and `api_key_file`: a path that is not read yet."""
    tool_servers: tuple[ToolServerSpec, ...] = ()


def read_config(file: Path) -> ConfigFile:
    """Raises `ModelError` with the file, the option and the accepted values."""
    file = file.expanduser()
    top = read_table(read_toml(file), TOP, file=file, name="")
    server = read_table(top.get("server", {}), SERVER, file=file, name="server")
    for option in _PATHS & server.keys():
        server[option] = _folder(file) / Path(server[option]).expanduser()
    if "media_folders" in server:
        server["media_folders"] = tuple(_folder(file) / Path(name).expanduser() for name in server["media_folders"])
    models = _models(top.get("models", {}), file)
    reject_duplicates((name, f"{file}: {where}") for model in models for name, where in _names(model))
    return ConfigFile(models, server, read_tool_servers(top.get("mcp", {}), file, _folder(file)))


def reject_duplicates(names: Iterable[tuple[str, str]]) -> None:
    """Raises `ModelError` if a name occurs twice. `names` are pairs: a model's name or alias, and where it is set."""
    seen: dict[str, str] = {}
    for name, where in names:
        if name in seen:
            raise ModelError(
                f"{where}: the name {name!r} is already used by {seen[name]}. Names and aliases must be unique."
            )
        seen[name] = where


def _models(table: object, file: Path) -> tuple[ModelSpec, ...]:
    if not isinstance(table, dict):
        raise ModelError(f"{file}: models must be tables, one per model: [models.NAME]")
    return tuple(_model(name, options, file) for name, options in table.items())


def _model(name: str, table: object, file: Path) -> ModelSpec:
    if not name.strip():
        raise ModelError(f'{file}: [models."{name}"] has an empty name. Requests need a name for the model.')
    where = joined("models", name)
    values = read_table(table, MODEL, file=file, name=where)
    if "source" not in values:
        raise ModelError(f'{file}: [{where}] needs a source: a folder, a .gguf file, a hub id (org/name) or "demo"')
    sampling = read_table(values.pop("sampling", {}), SAMPLING, file=file, name=f"{where}.sampling")
    return ModelSpec(
        source=_source(values.pop("source"), file),
        name=name,
        aliases=values.pop("alias", ()),
        sampling=tuple(sampling.items()),
        **values,
    )


def _names(model: ModelSpec) -> list[tuple[str, str]]:
    where = joined("models", model.name or "")
    return [(model.name or "", where), *((alias, f"{where}.alias") for alias in model.aliases)]


def _source(source: str, file: Path) -> str | None:
    """Resolve a path against the config file's folder if it can only be a path, or if it exists there."""
    if source == DEMO_SOURCE:
        return None
    path = _folder(file) / source
    is_path = source.startswith(_RELATIVE) or source in (".", "..")
    return str(path) if is_path or path.exists() else source


def _folder(file: Path) -> Path:
    """The config file's folder, as an absolute path: `./org/name` must not become `org/name`, which is a hub id.

    Symbolic links are not resolved: paths are relative to the link, not to its target.
    """
    return file.absolute().parent
