"""The models of a running server, as a command of the same machine or another one asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream.cli.parser import did_you_mean
from millstream.cli.server_client import TIMEOUT, ServerClient
from millstream.errors import MillstreamError, NotFound

BROKEN = ("failed", "stopped")
"""States of models that do not answer."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    state: str
    aliases: tuple[str, ...] = ()
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()
    """Empty: not known, because the model was never loaded."""
    progress: float | None = None
    phase: str | None = None
    """What a load does at the moment, if the server tells."""
    error: str | None = None


def served_models(url: str, key: str | None) -> list[ServedModel]:
    """Raises a `MillstreamError` that says what to do if there is no such server, or none of ours."""
    return list_models(ServerClient(url, key))


def fetch_models(url: str, key: str | None) -> list[dict[str, Any]]:
    """All fields of the models. Raises as `served_models` does."""
    return _fields(ServerClient(url, key), TIMEOUT)


def list_models(client: ServerClient, timeout: float = TIMEOUT) -> list[ServedModel]:
    return [_model(fields) for fields in _fields(client, timeout)]


def _fields(client: ServerClient, timeout: float) -> list[dict[str, Any]]:
    listed = client.get("/v1/models", timeout)
    try:
        models = [dict(fields) for fields in listed["data"]]
    except (KeyError, TypeError, ValueError):
        models = [{}]
    if not all("id" in fields and "state" in fields for fields in models):
        raise MillstreamError(f"The server at {client.url} is not Millstream: it does not list its models.")
    return models


def find_fields(models: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The model of this name or alias."""
    for fields in models:
        aliases = fields.get("aliases")
        if name == fields["id"] or (isinstance(aliases, list) and name in aliases):
            return fields
    return None


def find(models: Sequence[ServedModel], wanted: str) -> ServedModel | None:
    """By name or alias."""
    return next((model for model in models if wanted == model.name or wanted in model.aliases), None)


def choose(models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
    """The wanted model, or the first of the most suitable ones: for chats, loaded, able to use tools, not failed."""
    if wanted:
        if (model := find(models, wanted)) is not None:
            return model
        names = ", ".join(model.name for model in models) or "none"
        known = [name for model in models for name in (model.name, *model.aliases)]
        hint = did_you_mean(wanted, known)
        raise NotFound(f"The server has no model {wanted!r}. {hint}{' ' if hint else ''}Its models: {names}.")
    usable = [model for model in models if model.state not in BROKEN]
    if not usable:
        raise NotFound("The server has no model that works. Start it with one: 'millstream serve MODEL'.")
    return min(usable, key=lambda model: (_is_other(model), model.state != "ready", "tools" not in model.capabilities))


def _is_other(model: ServedModel) -> bool:
    """True for models that embed, speak or transcribe. Of some nothing is known before they are loaded."""
    return bool(model.capabilities) and "completion" not in model.capabilities


def _model(fields: dict[str, Any]) -> ServedModel:
    aliases, capabilities, context = (fields.get(name) for name in ("aliases", "capabilities", "context_length"))
    progress, phase, error = (fields.get(name) for name in ("progress", "phase", "error"))
    return ServedModel(
        name=str(fields["id"]),
        state=str(fields["state"]),
        aliases=tuple(aliases) if isinstance(aliases, list) else (),
        context_length=context if isinstance(context, int) else None,
        capabilities=tuple(capabilities) if isinstance(capabilities, list) else (),
        progress=float(progress) if isinstance(progress, int | float) else None,
        phase=phase if isinstance(phase, str) else None,
        error=error if isinstance(error, str) else None,
    )
