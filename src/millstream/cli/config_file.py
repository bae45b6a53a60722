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

from millstream.cli.mcp_tables import read_tool_servers
from millstream.cli.model_options import MODEL_OPTIONS, SAMPLING_OPTIONS
from millstream.cli.serve_options import OPTIONS
from millstream.cli.toml_lines import Lines, find_lines
from millstream.cli.toml_tables import Reader, joined, parse_toml, read_table, read_text
from millstream.config import ModelSpec, ToolServerSpec
from millstream.errors import ModelError

DEMO_SOURCE = "demo"

MODEL: dict[str, Reader] = {name: option.read for name, option in MODEL_OPTIONS.items()}
SAMPLING: dict[str, Reader] = {name: option.read for name, option in SAMPLING_OPTIONS.items()}
SERVER: dict[str, Reader] = {name: option.value.toml for name, option in OPTIONS.items() if "file" in option.places}
TOP: dict[str, Reader] = dict.fromkeys(("models", "server", "mcp"), lambda value: value)

_RELATIVE = ("./", "../", ".\\", "..\\")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The contents of a config file."""

    models: tuple[ModelSpec, ...] = ()
    server: dict[str, Any] = field(default_factory=dict)
    """The values of [server] by option."""
    tool_servers: tuple[ToolServerSpec, ...] = ()
    path: Path | None = field(default=None, compare=False)
    """None if no file was read."""
    lines: Lines = field(default_factory=dict, compare=False)
    """The line numbers of tables and keys, as far as they could be found."""

    def place_of(self, *keys: str) -> str:
        """Where a key or a table is: the file, with the line if it is known."""
        line = self.lines.get(keys)
        return f"{self.path}:{line}" if line else f"{self.path}"


def read_config(file: Path) -> ConfigFile:
    """Raises `ModelError` with the file, the option and the accepted values."""
    file = file.expanduser()
    text = read_text(file)
    top = read_table(parse_toml(text, file), TOP, file=file, name="")
    server = read_table(top.get("server", {}), SERVER, file=file, name="server")
    for name, value in server.items():
        if OPTIONS[name].value.is_path:
            server[name] = _resolved(value, _folder(file))
    if "draft" in server:
        server["draft"] = _source(server["draft"], file) or DEMO_SOURCE
    models = _models(top.get("models", {}), file)
    reject_duplicates((name, f"{file}: {where}") for model in models for name, where in _names(model))
    tool_servers = read_tool_servers(top.get("mcp", {}), file, _folder(file))
    return ConfigFile(models, server, tool_servers, file, find_lines(text))


def _resolved(value: str | tuple[str, ...], folder: Path) -> Path | tuple[Path, ...]:
    if isinstance(value, str):
        return folder / Path(value).expanduser()
    return tuple(folder / Path(name).expanduser() for name in value)


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
    if "draft" in values:
        values["draft"] = _source(values["draft"], file) or DEMO_SOURCE
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
