"""What the hub's client raises, and what each of it means for the person at the command line."""

from __future__ import annotations

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

# The base error of the client's HTTP library, which differs between versions of the client.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

FAILURES = (TransportError, OSError)
"""The hub cannot be reached, or it or the disk refuses."""


def reason_of(repo: str, error: Exception) -> str:
    """The reason, with a remedy if there is one."""
    match error:
        case GatedRepoError():
            return f"{repo} is gated: request access on its page, then set HF_TOKEN to a token of that account"
        case RepositoryNotFoundError():
            return f"the hub has no model '{repo}', or it is private; if so, set HF_TOKEN to a token with access"
        case HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return f"the hub refused access to {repo} ({response.status_code}): set HF_TOKEN to a valid token"
        case HfHubHTTPError(response=response) if response.status_code == 404:
            return f"the hub has no model '{repo}'"
        case HfHubHTTPError(response=response):
            return f"the hub answered {response.status_code} for {repo}"
        case LocalEntryNotFoundError() | TransportError():
            return f"the hub cannot be reached for {repo} ({type(error).__name__}: {error})"
        case _:
            return f"{repo} could not be downloaded: {error}"
