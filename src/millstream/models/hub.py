"""Models from the Hugging Face hub, through its own client: its cache, its token, its progress bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# The base of all errors of the client's HTTP library, and not the same library in all the client's versions.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

from millstream.errors import ModelError

Report = Callable[[str], None]

# What a model needs here. No Python: code from a repository is never run.
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# The same weights once more in another layout, as some publishers add them.
UNWANTED = ("consolidated*.safetensors", "original/*")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub, and which state of it."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def download(model: HubModel, *, report: Report, cache_dir: Path | None = None, endpoint: str | None = None) -> Path:
    """The folder of a model's snapshot. Without the hub a complete snapshot in the cache does, and is reported."""
    try:
        return _find(model, report, cache_dir, endpoint)
    except HFValidationError as error:
        raise ModelError(f"no hub has a model of this name: {error}") from error


def _find(model: HubModel, report: Report, cache_dir: Path | None, endpoint: str | None) -> Path:
    if constants.HF_HUB_OFFLINE:
        folder = _cached(model, cache_dir)
        if folder is None:
            raise ModelError(f"{model} is not in the cache, and HF_HUB_OFFLINE is set: unset it once to download")
        report(f"offline: serving {model} from the cache")
        return folder
    try:
        return _fetch(model, report, cache_dir, endpoint)
    except RevisionNotFoundError as error:
        raise ModelError(f"the hub has {model.repo}, but no revision '{model.revision}' of it") from error
    except (TransportError, OSError) as error:
        why = _reason(model, error)
        folder = _cached(model, cache_dir)
        if folder is None:
            raise ModelError(why) from error
        report(f"{why}; serving the copy in the cache")
        return folder


def _fetch(model: HubModel, report: Report, cache_dir: Path | None, endpoint: str | None) -> Path:
    # Asked first by itself: the download would fall back on the cache without a word.
    HfApi(endpoint=endpoint).model_info(model.repo, revision=model.revision)
    if _cached(model, cache_dir) is None:
        report(f"fetching {model} from the hub...")
    folder = snapshot_download(
        model.repo,
        revision=model.revision,
        cache_dir=cache_dir,
        endpoint=endpoint,
        allow_patterns=list(WANTED),
        ignore_patterns=list(UNWANTED),
    )
    return Path(folder)


def _cached(model: HubModel, cache_dir: Path | None) -> Path | None:
    """The complete snapshot in the cache, without a word to the network."""
    try:
        folder = snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=cache_dir,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def _reason(model: HubModel, error: Exception) -> str:
    """What went wrong, for the person at the command line, with the remedy where there is one."""
    match error:
        case GatedRepoError():
            return f"{model.repo} is gated: ask for access on its page, then set HF_TOKEN to a token of that account"
        case RepositoryNotFoundError():
            return f"the hub has no model '{model.repo}' that it shows to us; if it is private, set HF_TOKEN"
        case HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return f"the hub refused access to {model.repo} ({response.status_code}): set HF_TOKEN to a valid token"
        case HfHubHTTPError(response=response) if response.status_code == 404:
            return f"the hub has no model '{model.repo}'"
        case HfHubHTTPError(response=response):
            return f"the hub answered {response.status_code} for {model.repo}"
        case LocalEntryNotFoundError() | TransportError():
            return f"the hub cannot be reached for {model.repo} ({type(error).__name__}: {error})"
        case _:
            return f"{model.repo} could not be downloaded: {error}"
