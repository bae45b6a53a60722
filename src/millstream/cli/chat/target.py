"""What the arguments of a chat mean: which model, on which server, and what is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.cli.served_models import ServedModel, choose, find, list_models
from millstream.cli.server_client import DEFAULT_URL, ServerClient
from millstream.errors import MillstreamError, NotFound, Unauthorized
from millstream.models.demo import DEMO
from millstream.models.nearby import local_names, nearest_names

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*){1,2}([@:][\w./-]+)?", re.ASCII)
_DEMO_NAMES = ("demo", DEMO.name)


@dataclass(frozen=True, slots=True)
class Running:
    """The server to use, and its models."""

    client: ServerClient
    models: list[ServedModel]


def running_server(url: str | None, key: str | None) -> Running | None:
    """The server at the URL. Without a URL, the one at the usual address; None if there is none."""
    client = ServerClient(url or DEFAULT_URL, key)
    try:
        return Running(client, list_models(client))
    except Unauthorized:
        raise
    except MillstreamError:
        if url is not None:
            raise
        return None


def model_and_question(
    words: Sequence[str], model: str | None, running: Running | None, *, piped: bool
) -> tuple[str | None, str | None]:
    """Tell the model from the question: `chat MODEL`, `chat QUESTION` and `chat MODEL QUESTION` are all allowed.

    Raises `NotFound`, with suggestions, for a word that should be a model and is none.
    """
    if model is not None or not words:
        return model, " ".join(words) or None
    first, *rest = words
    if _names_model(first, running):
        return first, " ".join(rest) or None
    if len(words) == 1 and (piped or any(character.isspace() for character in first)):
        return None, first
    raise NotFound(_unknown(first, running))


def served(running: Running, wanted: str | None, *, explicit: bool) -> ServedModel | None:
    """The running server's model to talk to. None if it has not got it, but a private server could have it.

    `explicit`: the user named this server, so no other one may answer.
    """
    if wanted in _DEMO_NAMES and (demo := find(running.models, DEMO.name)):
        return demo
    if explicit or wanted is None or find(running.models, wanted) is not None or not _is_source(wanted):
        return choose(running.models, wanted)
    return None


def private_source(wanted: str | None) -> str | None:
    """What a private server is started with. None: the demo model."""
    return None if wanted is None or wanted in _DEMO_NAMES else wanted


def _names_model(word: str, running: Running | None) -> bool:
    if running is not None and find(running.models, word) is not None:
        return True
    return _is_source(word)


def _is_source(word: str) -> bool:
    """Whether it is a folder, a file or a hub id, or the demo model."""
    return word in _DEMO_NAMES or _HUB_ID.fullmatch(word) is not None or Path(word).expanduser().exists()


def _unknown(word: str, running: Running | None) -> str:
    models = [] if running is None else running.models
    known = [*(name for model in models for name in (model.name, *model.aliases)), *local_names(), *_DEMO_NAMES]
    near = nearest_names(word, known)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"There is no model {word!r}. {hint}A model is a folder, a .gguf file or a hub id (org/name). "
        f"To ask a question, put it into quotes: millstream chat MODEL 'QUESTION'."
    )
