"""Resolves a model argument to files on this machine: a folder, a GGUF file, a hub id, or the demo model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millstream.errors import ModelError
from millstream.models.demo import DEMO, demo_model, demo_path
from millstream.models.kokoro_config import torch_weights
from millstream.models.nearby import suggestion

if TYPE_CHECKING:
    from millstream.models.hub import HubModel

Report = Callable[[str], None]
BytesDone = Callable[[int, int], None]
"""Gets the bytes that are on this machine, and those of all files."""

DEMO_NAMES = ("demo", DEMO.name)
_HUB_ID = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:/(?P<file>[\w-][\w. -]*(?:/[\w-][\w. -]*)*\.gguf)|:(?P<tag>[\w.-]+))?"
    r"(?:@(?P<revision>[\w./-]+))?",
    re.ASCII | re.IGNORECASE,
)
_PATH_STARTS = ("/", "./", "../", "~", ".\\", "..\\")
_GGUF_MAGIC = b"GGUF"
_EXPECTED_FOLDER = "A model folder has config.json, one or more *.safetensors files, and the tokenizer's files"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: the name to serve it under, and its path."""

    name: str
    kind: Literal["folder", "gguf"]
    path: Path


def name_of(spec: str | None) -> str:
    """The name that `resolve` will give the model, without a download. Returns `spec` itself if it names no model."""
    if is_demo(spec):
        return DEMO.name
    assert spec is not None
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        file = _only_gguf(path)
        return file.stem if file else path.resolve().name
    if path.is_file():
        return path.stem
    hub_id = None if _is_path(spec) else _HUB_ID.fullmatch(spec)
    return _hub_name(hub_id) if hub_id else spec


def is_demo(spec: str | None) -> bool:
    """True for None, and for the demo model's names unless there is such a folder or file."""
    return spec is None or (spec in DEMO_NAMES and not Path(spec).exists())


def resolve(
    spec: str | None,
    *,
    cache_dir: Path | None = None,
    report: Report,
    progress: BytesDone = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ModelSource:
    """Find the model and download it if needed. Raises `ModelError` with what was tried, `LoadCancelled` soon after
    `cancelled` is true.

    `cache_dir` is the folder for downloads; by default hub models go to the hub client's own cache. `progress` follows
    a download.
    """
    if is_demo(spec):
        file = demo_model(report=report, progress=progress, cancelled=cancelled, cache_dir=cache_dir)
        return ModelSource(DEMO.name, "gguf", file)
    assert spec is not None
    hub_folder = cache_dir and cache_dir / "hub"
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _folder(path)
    if path.is_file():
        return _gguf(path)
    if _is_path(spec):
        raise ModelError(f"no such folder or file: {spec}.{suggestion(spec, hub_folder)}")
    if (hub_id := _HUB_ID.fullmatch(spec)) is None:
        raise ModelError(
            f"no such folder or file: {spec}; a hub id would look like org/name.{suggestion(spec, hub_folder)}"
        )
    from millstream.models import hub  # slow to import, and most models are local

    model = _hub_model(hub_id)
    try:
        path = hub.download(model, report=report, progress=progress, cancelled=cancelled, cache_dir=hub_folder)
    except ModelError as error:
        raise ModelError(f"{error.message}{'.' if (near := suggestion(spec, hub_folder)) else ''}{near}") from error
    return _from_hub(hub_id, path)


def find_local(spec: str | None, *, cache_dir: Path | None = None) -> ModelSource | None:
    """The model as `resolve` finds it, if its files are on this machine. Downloads nothing, and asks no hub."""
    if is_demo(spec):
        file = demo_path(cache_dir)
        return ModelSource(DEMO.name, "gguf", file) if file.is_file() else None
    assert spec is not None
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _folder(path)
    if path.is_file():
        return _gguf(path)
    if _is_path(spec) or (hub_id := _HUB_ID.fullmatch(spec)) is None:
        return None
    from millstream.models import hub

    found = hub.cached(_hub_model(hub_id), cache_dir and cache_dir / "hub")
    return None if found is None else _from_hub(hub_id, found)


def _hub_model(hub_id: re.Match[str]) -> HubModel:
    from millstream.models.hub import HubModel

    return HubModel(hub_id["repo"], hub_id["revision"], hub_id["file"], hub_id["tag"])


def _hub_name(hub_id: re.Match[str]) -> str:
    """A GGUF file is named like one of this machine, or as it was asked for: `org/name:Q4_K_M`."""
    if hub_id["file"]:
        return Path(hub_id["file"]).stem
    return f"{hub_id['repo']}:{hub_id['tag']}" if hub_id["tag"] else hub_id["repo"]


def _from_hub(hub_id: re.Match[str], path: Path) -> ModelSource:
    """`path`: a folder of the cache, or a GGUF file, which must keep its name: it is a link to one with a hash."""
    if path.suffix.lower() == ".gguf":
        _require_magic(path)
        return ModelSource(_hub_name(hub_id), "gguf", path)
    _require_files(path, f"the hub's {hub_id['repo']}")
    return ModelSource(_hub_name(hub_id), "folder", path)


def _is_path(spec: str) -> bool:
    """True if `spec` looks like a path, so that it cannot be a hub id. A GGUF file of the hub has two names before
    it: `org/name/file.gguf`."""
    is_file = spec.lower().endswith(".gguf") and spec.count("/") < 2
    return spec.startswith(_PATH_STARTS) or spec in (".", "..") or is_file


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has exactly one and no config.json. Returns None otherwise."""
    files = [] if (folder / "config.json").is_file() else list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def _folder(path: Path) -> ModelSource:
    path = path.resolve()
    if file := _only_gguf(path):
        return _gguf(file)
    names = sorted(file.name for file in path.glob("*.gguf"))
    if names and not (path / "config.json").is_file():
        raise ModelError(f"{path} has several GGUF files; give the path of one of them: {', '.join(names)}")
    _require_files(path, str(path))
    return ModelSource(path.name, "folder", path)


def _require_files(path: Path, title: str) -> None:
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(path.glob("*.safetensors")) and torch_weights(path) is None:
        missing.append("*.safetensors")
    if not missing:
        return
    hint = ""
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        hint = ". PyTorch weights must be converted first, for example with mlx_lm.convert"
    raise ModelError(f"{title} is not a model folder: it has no {' and no '.join(missing)}. {_EXPECTED_FOLDER}{hint}")


def _gguf(path: Path) -> ModelSource:
    _require_magic(path)
    return ModelSource(path.stem, "gguf", path.resolve())


def _require_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if magic != _GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file. Give a .gguf file, a model folder or a hub id (org/name)")
