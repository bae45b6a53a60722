"""Resolves a model argument to files on this machine: a folder, a GGUF file, a hub id, or None for the demo model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream.errors import ModelError
from millstream.models.demo import DEMO, demo_model, demo_path
from millstream.models.nearby import suggestion

Report = Callable[[str], None]

_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
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
    if spec is None:
        return DEMO.name
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        file = _only_gguf(path)
        return file.stem if file else path.resolve().name
    if path.is_file():
        return path.stem
    hub_id = None if _is_path(spec) else _HUB_ID.fullmatch(spec)
    return hub_id["repo"] if hub_id else spec


def resolve(spec: str | None, *, cache_dir: Path | None = None, report: Report) -> ModelSource:
    """Find the model and download it if needed. Raises `ModelError` with what was tried.

    `cache_dir` is the folder for downloads; by default hub models go to the hub client's own cache.
    """
    if spec is None:
        return ModelSource(DEMO.name, "gguf", demo_model(report=report, cache_dir=cache_dir))
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _folder(path)
    if path.is_file():
        return _gguf(path)
    if _is_path(spec):
        raise ModelError(f"no such folder or file: {spec}.{suggestion(spec)}")
    if (hub_id := _HUB_ID.fullmatch(spec)) is None:
        raise ModelError(f"no such folder or file: {spec}; a hub id would look like org/name.{suggestion(spec)}")
    from millstream.models import hub  # slow to import, and most models are local

    model = hub.HubModel(hub_id["repo"], hub_id["revision"])
    try:
        path = hub.download(model, report=report, cache_dir=cache_dir and cache_dir / "hub")
    except ModelError as error:
        raise ModelError(f"{error.message}{'.' if (near := suggestion(spec)) else ''}{near}") from error
    _require_files(path, f"the hub's {model}")
    return ModelSource(model.repo, "folder", path)


def find_local(spec: str | None, *, cache_dir: Path | None = None) -> ModelSource | None:
    """The model as `resolve` finds it, if its files are on this machine. Downloads nothing, and asks no hub."""
    if spec is None:
        file = demo_path(cache_dir)
        return ModelSource(DEMO.name, "gguf", file) if file.is_file() else None
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _folder(path)
    if path.is_file():
        return _gguf(path)
    if _is_path(spec) or (hub_id := _HUB_ID.fullmatch(spec)) is None:
        return None
    from millstream.models import hub

    folder = hub.cached(hub.HubModel(hub_id["repo"], hub_id["revision"]), cache_dir and cache_dir / "hub")
    return None if folder is None else ModelSource(hub_id["repo"], "folder", folder)


def _is_path(spec: str) -> bool:
    """True if `spec` looks like a path, so that it cannot be a hub id."""
    return spec.startswith(_PATH_STARTS) or spec in (".", "..") or spec.lower().endswith(".gguf")


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
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not missing:
        return
    hint = ""
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        hint = ". PyTorch weights must be converted first, for example with mlx_lm.convert"
    raise ModelError(f"{title} is not a model folder: it has no {' and no '.join(missing)}. {_EXPECTED_FOLDER}{hint}")


def _gguf(path: Path) -> ModelSource:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if magic != _GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file. Give a .gguf file, a model folder or a hub id (org/name)")
    return ModelSource(path.stem, "gguf", path.resolve())
