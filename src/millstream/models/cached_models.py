"""The models on this machine's disk: those in the cache of the hub's client, and the demo model."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.models.card import CARD
from millstream.models.demo import DEMO, demo_path
from millstream.models.gguf_choice import gguf_files, tag_of
from millstream.models.last_used import forget_used, last_used
from millstream.models.source import ModelSource

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    """As `serve`, `show` and `rm` take it."""
    path: Path
    """Its folder or GGUF file; for an incomplete one, the folder of its repository."""
    size: int
    """Bytes on disk."""
    is_complete: bool = True
    repo: str | None = None
    """On the hub; None for the demo model."""
    commit: str | None = None
    last_used: float | None = None
    """When it was last loaded, in seconds since 1970."""

    @property
    def source(self) -> ModelSource:
        return ModelSource(self.name, "gguf" if self.path.suffix.lower() == ".gguf" else "folder", self.path)


def cached_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """All models on disk, by name. `cache_dir`: as for `resolve`."""
    found = [*_demo(cache_dir), *(model for repo in _Cache(cache_dir).repos() for model in repo)]
    return sorted(found, key=lambda model: model.name.lower())


def remove(models: Iterable[CachedModel], cache_dir: Path | None = None) -> None:
    """Delete these models from the disk, and what no other model in the cache needs."""
    for model in models:
        forget_used(model.path, cache_dir)
        if model.repo is None:
            model.path.unlink(missing_ok=True)
        else:
            _Cache(cache_dir).remove(model)


def _demo(cache_dir: Path | None) -> Iterator[CachedModel]:
    file = demo_path(cache_dir)
    if file.is_file():
        yield CachedModel(DEMO.name, file, file.stat().st_size, last_used=last_used(file, cache_dir))


class _Cache:
    """The cache of the hub's client."""

    def __init__(self, cache_dir: Path | None) -> None:
        from huggingface_hub import constants  # slow to import

        self._cache_dir = cache_dir
        self._folder = cache_dir / "hub" if cache_dir else Path(constants.HF_HUB_CACHE)

    def repos(self) -> Iterator[list[CachedModel]]:
        info = self._scan()
        if info is None:
            return
        partial: dict[Path, int] = {}
        for file in info.incomplete_files:
            folder = file.file_path.parent.parent
            partial[folder] = partial.get(folder, 0) + file.size_on_disk
        for repo in info.repos:
            if repo.repo_type == "model":
                rest = partial.pop(repo.repo_path, 0)
                models = [model for revision in repo.revisions for model in self._models(repo, revision)]
                incomplete = [model for model in models if not model.is_complete]
                if rest and not incomplete:
                    models.append(CachedModel(repo.repo_id, repo.repo_path, rest, False, repo.repo_id))
                yield models
        for folder, size in partial.items():  # nothing of it is complete, so the client does not list it
            if (name := _repo_of(folder)) is not None:
                yield [CachedModel(name, folder, size, False, name)]

    def remove(self, model: CachedModel) -> None:
        info = self._scan()
        repos = (
            [repo for repo in info.repos if repo.repo_id == model.repo and repo.repo_type == "model"] if info else []
        )
        others = [
            each for repo in repos for revision in repo.revisions for each in self._models(repo, revision)
            if each.path != model.path
        ]  # fmt: skip
        if info is None or not repos or not others:
            assert model.repo is not None
            _remove_folders(self._folder, model.repo)
        elif model.source.kind == "gguf":
            _remove_link(model.path)
        elif model.commit is not None:
            info.delete_revisions(model.commit).execute()

    def _scan(self) -> HFCacheInfo | None:
        from huggingface_hub import scan_cache_dir

        return scan_cache_dir(self._folder) if self._folder.is_dir() else None

    def _models(self, repo: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[CachedModel]:
        from millstream.models.hub import HubModel, cached

        folder = revision.snapshot_path
        sizes = {file.file_path.relative_to(folder).as_posix(): file.size_on_disk for file in revision.files}
        suffix = "" if "main" in revision.refs else f"@{min(revision.refs, default=revision.commit_hash)}"
        files = gguf_files(sizes)
        tags = [tag_of(file) for file in files]
        for file, tag in zip(files, tags, strict=True):
            part = f":{tag}" if tag is not None and tags.count(tag) == 1 else f"/{file}"
            yield self._model(f"{repo.repo_id}{part}{suffix}", folder / file, sizes[file], repo, revision)
        rest = {name: size for name, size in sizes.items() if not name.lower().endswith(".gguf")}
        if not files or set(rest) - {CARD}:
            if files and not any(name.endswith(".safetensors") for name in rest):
                return
            complete = cached(HubModel(repo.repo_id, revision.commit_hash), self._folder) is not None
            size = sum(rest.values())
            yield self._model(f"{repo.repo_id}{suffix}", folder, size, repo, revision, complete=complete)

    def _model(
        self,
        name: str,
        path: Path,
        size: int,
        repo: CachedRepoInfo,
        revision: CachedRevisionInfo,
        *,
        complete: bool = True,
    ) -> CachedModel:
        used = last_used(path, self._cache_dir)
        return CachedModel(name, path, size, complete, repo.repo_id, revision.commit_hash, used)


def _repo_of(folder: Path) -> str | None:
    """`org/name` of `models--org--name`."""
    kind, *parts = folder.name.split("--")
    return "/".join(parts) if kind == "models" and len(parts) == 2 else None


def _remove_folders(cache: Path, repo: str) -> None:
    """All of a repository, with partial downloads and locks."""
    name = f"models--{repo.replace('/', '--')}"
    if (cache / name).is_dir():
        shutil.rmtree(cache / name)
    shutil.rmtree(cache / ".locks" / name, ignore_errors=True)


def _remove_link(file: Path) -> None:
    """A file of a snapshot, and the blob behind it unless another snapshot has it too."""
    blob = file.resolve()
    file.unlink()
    snapshots = next(parent for parent in file.parents if parent.name == "snapshots")
    if not any(other.is_symlink() and other.resolve() == blob for other in snapshots.rglob("*")):
        blob.unlink(missing_ok=True)
