"""The TOML file of `--config`: what to serve, each model with options of its own, and options of the server.

[server]
memory = "16GB"

[models.small]
source = "mlx-community/Qwen3-0.6B-4bit"
alias = ["tiny"]
pin = true

[models.small.sampling]
temperature = 0.7
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.cli import tables
from millstream.cli.tables import Reader, joined, read_table, read_toml
from millstream.config import KV_BITS, ModelSpec
from millstream.errors import ModelError
from millstream.text.chat_format import AUTO, NONE, REASONING
from millstream.text.tool_formats.registry import FORMATS

LOAD = ("start", "use")
ISOLATION = ("auto", "thread", "process")
DEMO_SOURCE = "demo"
TOOL_FORMATS = (AUTO, NONE, *FORMATS)
REASONING_FORMATS = (AUTO, NONE, *REASONING)

_INT32 = 2**31 - 1
_MANY = 2**40
_RELATIVE = ("./", "../", ".\\", "..\\")


def _as_it_is(value: object) -> object:
    """For tables within tables, which are read on their own."""
    return value


def _top_k(value: object) -> int:
    """As in the API, -1 is another way to say 0: no limit."""
    return max(0, int(tables.whole(-1, _INT32)(value)))


SAMPLING: dict[str, Reader] = {
    "temperature": tables.number(0, 2),
    "top_p": tables.number(0, 1, above=True),
    "top_k": _top_k,
    "min_p": tables.number(0, 1),
    "repetition_penalty": tables.number(0, 10, above=True),
    "presence_penalty": tables.number(-2, 2),
    "frequency_penalty": tables.number(-2, 2),
}
"""The ranges are those of `api/openai/schema.py`; a test holds them together."""

MODEL: dict[str, Reader] = {
    "source": tables.text,
    "alias": tables.text_or_texts,
    "pin": tables.truth,
    "load": tables.one_of(*LOAD),
    "idle_unload": tables.time_span,
    "max_batch": tables.whole(1, _MANY),
    "isolation": tables.one_of(*ISOLATION),
    "kv_memory": tables.size,
    "kv_bits": tables.one_number_of(*KV_BITS),
    "max_tokens": tables.whole(1, _INT32),
    "tool_format": tables.one_of(*TOOL_FORMATS),
    "reasoning_format": tables.one_of(*REASONING_FORMATS),
    "allow_special_tokens": tables.truth,
    "sampling": _as_it_is,
}

SERVER: dict[str, Reader] = {
    "host": tables.text,
    "port": tables.whole(0, 65535),
    "memory": tables.size,
    "prefix_cache_memory": tables.size_or_none,
    "prefix_cache_disk": tables.size_or_none,
    "kv_bits": tables.one_number_of(*KV_BITS),
    "load": tables.one_of(*LOAD),
    "idle_unload": tables.time_span,
    "step_timeout": tables.time_span,
    "unread_output": tables.size,
    "write_timeout": tables.time_span,
    "isolation": tables.one_of(*ISOLATION),
    "max_batch": tables.whole(1, _MANY),
    "queue": tables.whole(0, _MANY),
    "tool_format": tables.one_of(*TOOL_FORMATS),
    "reasoning_format": tables.one_of(*REASONING_FORMATS),
    "allow_special_tokens": tables.truth,
    "api_keys": tables.texts,
    "api_key_file": tables.text,
    "cors_origins": tables.origins,
    "allowed_hosts": tables.host_names,
    "max_connections": tables.whole(1, _MANY),
    "header_timeout": tables.time_span,
    "body_timeout": tables.time_span,
    "media_folders": tables.texts,
    "media_bytes": tables.size,
    "media_pixels": tables.whole(1, _MANY),
    "media_count": tables.whole(0, _MANY),
    "media_timeout": tables.time_span,
    "media_seconds": tables.time_span,
    "media_memory": tables.size,
    "allow_private_media": tables.truth,
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says."""

    models: tuple[ModelSpec, ...] = ()
    server: dict[str, Any] = field(default_factory=dict)
    """Fields of `Settings`; and `api_key_file`, a path that is not read yet."""


def read_config(file: Path) -> ConfigFile:
    """Raises `ModelError` with the file, the option and what would be right."""
    file = file.expanduser()
    top = read_table(read_toml(file), {"models": _as_it_is, "server": _as_it_is}, file=file, name="")
    server = read_table(top.get("server", {}), SERVER, file=file, name="server")
    if "api_key_file" in server:
        server["api_key_file"] = _folder(file) / Path(server["api_key_file"]).expanduser()
    if "media_folders" in server:
        server["media_folders"] = tuple(_folder(file) / Path(name).expanduser() for name in server["media_folders"])
    models = _models(top.get("models", {}), file)
    refuse_clashes((name, f"{file}: {where}") for model in models for name, where in _names(model))
    return ConfigFile(models, server)


def refuse_clashes(names: Iterable[tuple[str, str]]) -> None:
    """`names` are pairs: what requests may call a model, and where that stands."""
    seen: dict[str, str] = {}
    for name, where in names:
        if name in seen:
            raise ModelError(
                f"{where}: the name {name!r} is taken already, by {seen[name]}. Names and aliases must be different"
            )
        seen[name] = where


def _models(table: object, file: Path) -> tuple[ModelSpec, ...]:
    if not isinstance(table, dict):
        raise ModelError(f"{file}: models must be tables, one for each model, as in [models.NAME]")
    return tuple(_model(name, options, file) for name, options in table.items())


def _model(name: str, table: object, file: Path) -> ModelSpec:
    if not name.strip():
        raise ModelError(f'{file}: [models."{name}"] has an empty name. It is what requests call the model')
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
    """A path counts from the file's folder if it can only be a path or leads somewhere from there."""
    if source == DEMO_SOURCE:
        return None
    path = _folder(file) / source
    is_path = source.startswith(_RELATIVE) or source in (".", "..")
    return str(path) if is_path or path.exists() else source


def _folder(file: Path) -> Path:
    """Absolute: `./org/name` must not become `org/name`, which is a hub id. Links are not followed: the file may be
    one, and what lies beside it is meant."""
    return file.absolute().parent
