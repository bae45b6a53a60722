"""Finds models of the Hugging Face hub: in the cache of its client, or by a download into it.

The files are downloaded by a child process (`hub_child.py`), which can be ended at any moment. What it has received
is kept, and the next download continues there.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from millstream import sandbox
from millstream.errors import ModelError
from millstream.models.card import CARD
from millstream.models.child_process import run_child
from millstream.models.gguf_choice import choose_gguf, gguf_files
from millstream.models.hub_errors import FAILURES, reason_of

Report = Callable[[str], None]
BytesDone = Callable[[int, int], None]

# The files that a model needs. No Python: code from a repository is never run.
ALLOWED = (
    "*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "kokoro-v*.pth", "voices/*.pt",
    "weights.npz",
)  # fmt: skip
# Copies of the weights in another layout, which some publishers add.
IGNORED = ("consolidated*.safetensors", "original/*")

ANSWER_SECONDS = 30.0
"""For the hub to answer what files a model has. Then it counts as out of reach."""
_CHILD, _EVENT = "millstream.models.hub_child", "millstream: "
_TAIL_LINES = 5


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub, a revision of it, and a GGUF file if that is the model: by name or by quantisation."""

    repo: str
    revision: str | None = None
    file: str | None = None
    tag: str | None = None

    def __str__(self) -> str:
        part = f"/{self.file}" if self.file else f":{self.tag}" if self.tag else ""
        return f"{self.repo}{part}@{self.revision}" if self.revision else f"{self.repo}{part}"

    @property
    def is_gguf(self) -> bool:
        return self.file is not None or self.tag is not None


def download(
    model: HubModel,
    *,
    report: Report,
    progress: BytesDone = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of the model's snapshot, or its GGUF file. If the hub cannot be reached, uses a complete snapshot in
    the cache and reports that. `progress` gets bytes while files are downloaded; raises `LoadCancelled` once
    `cancelled` is true."""
    job = _Download(model, report, progress, cancelled, cache_dir, endpoint)
    try:
        return job.find()
    except HFValidationError as error:
        raise ModelError(f"this is not a valid model name on the hub: {error}") from error


class _Unreachable(Exception):
    """The child could not reach the hub, or was refused."""


@dataclass(frozen=True, slots=True)
class _Download:
    model: HubModel
    report: Report
    progress: BytesDone
    cancelled: Callable[[], bool]
    cache_dir: Path | None
    endpoint: str | None

    def find(self) -> Path:
        model = self.model
        if constants.HF_HUB_OFFLINE:
            if (path := cached(model, self.cache_dir)) is None:
                raise ModelError(
                    f"{model} is not in the cache, and HF_HUB_OFFLINE is set: unset it to download the model"
                )
            self.report(f"offline: serving {model} from the cache")
            return path
        try:
            return self._fetch()
        except RevisionNotFoundError as error:
            raise ModelError(f"the hub has {model.repo}, but no revision '{model.revision}'") from error
        except _Unreachable as error:
            return self._from_cache(str(error), error)
        except FAILURES as error:
            return self._from_cache(reason_of(model.repo, error), error)

    def _from_cache(self, reason: str, error: Exception) -> Path:
        path = cached(self.model, self.cache_dir)
        if path is None:
            raise ModelError(reason) from error
        self.report(f"{reason}; serving the copy in the cache")
        return path

    def _fetch(self) -> Path:
        # Ask the hub first: the download alone would fall back to the cache silently.
        model = self.model
        info = HfApi(endpoint=self.endpoint).model_info(model.repo, revision=model.revision, timeout=ANSWER_SECONDS)
        assert info.sha is not None, "the hub always names the commit"
        names = [sibling.rfilename for sibling in info.siblings or ()]
        file = _gguf_file(model, names)
        allowed, ignored = ((glob.escape(file),), ()) if file else (ALLOWED, IGNORED)
        here = _snapshot(model.repo, info.sha, self.cache_dir, allowed, ignored)
        # Another program may have made a snapshot of some files only.
        needed = filter_repo_objects(names, allow_patterns=list(allowed), ignore_patterns=list(ignored))
        if here is None or not all((here / name).is_file() for name in needed):
            self.report(f"downloading {model} from the hub...")
            # The card names the licence. A snapshot without it is complete.
            here = self._download(info.sha, (*allowed, CARD), ignored)
        else:
            _note_revision(here, model.revision or "main")
        return here if file is None else here / file

    def _download(self, commit: str, allowed: tuple[str, ...], ignored: tuple[str, ...]) -> Path:
        job = {
            "repo": self.model.repo,
            "revision": self.model.revision,
            "commit": commit,
            "allowed": allowed,
            "ignored": ignored,
            "cache_dir": None if self.cache_dir is None else str(self.cache_dir),
            "endpoint": self.endpoint,
        }
        outcome: dict[str, Any] = {}
        other_lines: list[str] = []

        def follow(line: str) -> None:
            if not line.startswith(_EVENT):
                other_lines.append(line)
                return
            event = json.loads(line.removeprefix(_EVENT))
            if "done" in event:
                self.progress(event["done"], event["total"])
            else:
                outcome.update(event)

        code = run_child(
            sandbox.command(_CHILD),
            on_line=follow,
            cancelled=self.cancelled,
            first_line=json.dumps(job),
            environment={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        if "folder" in outcome:
            return Path(outcome["folder"])
        if "unreachable" in outcome:
            raise _Unreachable(outcome["error"])
        tail = "\n".join(f"  {line}" for line in other_lines[-_TAIL_LINES:])
        raise ModelError(
            outcome.get("error") or f"the download of {self.model} ended with code {code}. Its output:\n{tail}"
        )


def _gguf_file(model: HubModel, names: list[str]) -> str | None:
    """The GGUF file that is meant, also in a repository that has nothing else. None for a folder of safetensors."""
    if model.is_gguf:
        return choose_gguf(model.repo, names, file=model.file, tag=model.tag)
    if any(name.endswith(".safetensors") for name in names) or not gguf_files(names):
        return None
    return choose_gguf(model.repo, names)


def cached(model: HubModel, cache_dir: Path | None) -> Path | None:
    """The complete snapshot in the cache, or the GGUF file, without network access. Returns None if there is none."""
    folder = None if model.is_gguf else _snapshot(model.repo, model.revision, cache_dir, ALLOWED, IGNORED)
    if folder is not None and any(folder.glob("*.safetensors")):
        return folder
    snapshot = _snapshot(model.repo, model.revision, cache_dir, (), ())
    if snapshot is None:
        return folder
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.is_file()]
    try:
        file = _gguf_file(model, names)
    except ModelError:  # another file of the repository is in the cache
        return folder
    return folder if file is None else snapshot / file


def _snapshot(
    repo: str, revision: str | None, cache_dir: Path | None, allowed: tuple[str, ...], ignored: tuple[str, ...]
) -> Path | None:
    """The snapshot in the cache, if it has all files of the repository that match."""
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(allowed),
            ignore_patterns=list(ignored),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def _note_revision(snapshot: Path, revision: str) -> None:
    """Let the cache know which commit a branch or tag is now. `snapshot` is `.../snapshots/COMMIT`."""
    ref = snapshot.parent.parent / "refs" / revision
    if revision == snapshot.name or (ref.is_file() and ref.read_text() == snapshot.name):
        return
    try:
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(snapshot.name)
    except OSError:  # a cache that may only be read
        return
