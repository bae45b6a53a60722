"""Downloads models from the Hugging Face hub with its own client, which brings its cache, token and progress bar."""

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

# The base error of the client's HTTP library, which differs between versions of the client.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

from millstream.errors import ModelError

Report = Callable[[str], None]

# The files that a model needs. No Python: code from a repository is never run.
ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Copies of the weights in another layout, which some publishers add.
IGNORED = ("consolidated*.safetensors", "original/*")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub, and a revision of it."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def download(model: HubModel, *, report: Report, cache_dir: Path | None = None, endpoint: str | None = None) -> Path:
    """The folder of the model's snapshot. If the hub cannot be reached, uses a complete snapshot in the cache and
    reports that."""
    try:
        return _find(model, report, cache_dir, endpoint)
    except HFValidationError as error:
        raise ModelError(f"this is not a valid model name on the hub: {error}") from error


def _find(model: HubModel, report: Report, cache_dir: Path | None, endpoint: str | None) -> Path:
    if constants.HF_HUB_OFFLINE:
        folder = cached(model, cache_dir)
        if folder is None:
            raise ModelError(f"{model} is not in the cache, and HF_HUB_OFFLINE is set: unset it to download the model")
        report(f"offline: serving {model} from the cache")
        return folder
    try:
        return _fetch(model, report, cache_dir, endpoint)
    except RevisionNotFoundError as error:
        raise ModelError(f"the hub has {model.repo}, but no revision '{model.revision}'") from error
    except (TransportError, OSError) as error:
        reason = _reason(model, error)
        folder = cached(model, cache_dir)
        if folder is None:
            raise ModelError(reason) from error
        report(f"{reason}; serving the copy in the cache")
        return folder


def _fetch(model: HubModel, report: Report, cache_dir: Path | None, endpoint: str | None) -> Path:
    # Ask the hub first: the download alone would fall back to the cache silently.
    HfApi(endpoint=endpoint).model_info(model.repo, revision=model.revision)
    if cached(model, cache_dir) is None:
        report(f"downloading {model} from the hub...")
    folder = snapshot_download(
        model.repo,
        revision=model.revision,
        cache_dir=cache_dir,
        endpoint=endpoint,
        allow_patterns=list(ALLOWED),
        ignore_patterns=list(IGNORED),
    )
    return Path(folder)


def cached(model: HubModel, cache_dir: Path | None) -> Path | None:
    """The complete snapshot in the cache, without network access. Returns None if there is none."""
    try:
        folder = snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=cache_dir,
            allow_patterns=list(ALLOWED),
            ignore_patterns=list(IGNORED),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def _reason(model: HubModel, error: Exception) -> str:
    """The reason for the person at the command line, with a remedy if there is one."""
    match error:
        case GatedRepoError():
            return f"{model.repo} is gated: request access on its page, then set HF_TOKEN to a token of that account"
        case RepositoryNotFoundError():
            return f"the hub has no model '{model.repo}', or it is private; if so, set HF_TOKEN to a token with access"
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
