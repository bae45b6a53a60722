"""Downloads the files of a repository into the hub client's cache, with resume.

The hub's own client begins each file anew after an interruption. Here a partial file is kept beside the blobs under
the name `<hash>.incomplete` and continued by a range request. The client then makes the snapshot from the blobs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

# The base error of the client's HTTP library, which differs between versions of the client.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    filter_repo_objects,
    get_session,
    hf_raise_for_status,
)

from millstream.errors import ModelError
from millstream.models.disk_space import check_space

BytesDone = Callable[[int, int], None]
"""Gets the bytes that are on this machine, and those of all files."""

CHUNK = 256 * 1024
CONNECTIONS = 4
ATTEMPTS = 5
"""Consecutive failures without a byte between them, after which a file is given up."""
TIMEOUT = 30.0
"""Seconds without a byte."""
_HASH = re.compile("[0-9a-f]{40,64}")
_RANGE_IGNORED = 200
_RANGE_WRONG = 416


@dataclass(frozen=True, slots=True)
class Repository:
    """A commit of a repository, and the files of it that are needed."""

    repo: str
    revision: str | None
    commit: str
    allowed: tuple[str, ...]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    blob: str
    """Its name among the blobs, which is its ETag."""
    sha256: str | None
    """Of large files."""


def fetch(repository: Repository, *, progress: BytesDone, cache_dir: Path | None, endpoint: str | None) -> Path:
    """Download what is missing; returns the folder of the snapshot. Raises `ModelError` if the disk is too small."""
    root = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().resolve()
    blobs = root / repo_folder_name(repo_id=repository.repo, repo_type="model") / "blobs"
    files = {file.blob: file for file in _files(repository, endpoint)}
    missing = [file for file in files.values() if not (blobs / file.blob).exists()]
    ours = [file for file in missing if _HASH.fullmatch(file.blob) and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE]
    total = sum(file.size for file in files.values())
    needed = sum(file.size - _size(_partial(blobs, file)) for file in missing)
    check_space(repository.repo, needed, root)
    blobs.mkdir(parents=True, exist_ok=True)
    transfer = _Transfer(repository, blobs, endpoint, progress, total - needed, total)
    transfer.run(ours)  # the hub sends larger ones to its client alone
    folder = snapshot_download(
        repository.repo,
        revision=repository.revision,
        cache_dir=root,
        endpoint=endpoint,
        allow_patterns=list(repository.allowed),
        ignore_patterns=list(repository.ignored),
    )
    return Path(folder)


def _files(repository: Repository, endpoint: str | None) -> list[_File]:
    tree = HfApi(endpoint=endpoint).list_repo_tree(repository.repo, recursive=True, revision=repository.commit)
    entries = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    names = filter_repo_objects(
        entries, allow_patterns=list(repository.allowed), ignore_patterns=list(repository.ignored)
    )
    found = []
    for entry in map(entries.__getitem__, names):
        large = entry.lfs
        sha256 = large.sha256 if large is not None else None
        found.append(_File(entry.path, large.size if large else entry.size, sha256 or entry.blob_id, sha256))
    return found


def _partial(blobs: Path, file: _File) -> Path:
    return blobs / f"{file.blob}.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _Transfer:
    """Downloads files to blobs, some at the same time."""

    def __init__(
        self,
        repository: Repository,
        blobs: Path,
        endpoint: str | None,
        progress: BytesDone,
        done: int,
        total: int,
    ) -> None:
        self._repository = repository
        self._blobs = blobs
        self._endpoint = endpoint
        self._progress = progress
        self._done = done
        self._total = total
        self._lock = threading.Lock()
        self._failed = False

    def run(self, files: Sequence[_File]) -> None:
        """Large files first. Raises the first error."""
        self._progress(self._done, self._total)
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="download") as pool:
            for future in [pool.submit(self._download, file) for file in sorted(files, key=lambda file: -file.size)]:
                try:
                    future.result()
                except BaseException:
                    self._failed = True
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)

    def _download(self, file: _File) -> None:
        partial, blob = _partial(self._blobs, file), self._blobs / file.blob
        with partial.open("ab+") as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # another process may be downloading it: then wait for that
            if blob.exists():
                partial.unlink(missing_ok=True)
                self._add(file.size)
                return
            self._receive(file, out)
            out.flush()
            self._check(file, out)
            os.replace(partial, blob)

    def _receive(self, file: _File, out: BufferedRandom) -> None:
        attempts = 0
        while (have := out.seek(0, os.SEEK_END)) < file.size and not self._failed:
            try:
                self._receive_rest(file, out, have)
            except HfHubHTTPError as error:
                if error.response.status_code != _RANGE_WRONG or not have:
                    raise
                self._begin_anew(out)
            except TransportError:
                attempts = attempts + 1 if out.tell() == have else 1
                if attempts == ATTEMPTS:
                    raise
                time.sleep(min(8.0, 0.5 * 2**attempts))

    def _receive_rest(self, file: _File, out: BufferedRandom, have: int) -> None:
        repository = self._repository
        url = hf_hub_url(repository.repo, file.name, revision=repository.commit, endpoint=self._endpoint)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={have}-"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            if have and response.status_code == _RANGE_IGNORED:
                self._begin_anew(out)
            for chunk in response.iter_bytes(CHUNK):
                out.write(chunk)
                self._add(len(chunk))
                if self._failed:
                    return

    def _begin_anew(self, out: BufferedRandom) -> None:
        self._add(-out.seek(0, os.SEEK_END))
        out.truncate(0)

    def _check(self, file: _File, out: BufferedRandom) -> None:
        size = out.seek(0, os.SEEK_END)
        damaged = size != file.size
        if not damaged and file.sha256 is not None:
            out.seek(0)
            damaged = hashlib.file_digest(out, "sha256").hexdigest() != file.sha256
        if damaged and not self._failed:
            out.truncate(0)
            raise ModelError(f"{file.name} of {self._repository.repo} arrived damaged; start the download again")
