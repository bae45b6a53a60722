"""The models of a running server, as a command of the same machine or another one asks for them."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from millstream.errors import MillstreamError, NotFound, Unauthorized

TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    state: str
    aliases: tuple[str, ...] = ()
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()
    """Empty: not known, because the model was never loaded."""


def served_models(url: str, key: str | None) -> list[ServedModel]:
    """Raises a `MillstreamError` that says what to do if there is no such server, or none of ours."""
    models = fetch_models(url, key)
    try:
        return [_model(fields) for fields in models]
    except (KeyError, TypeError):
        raise _not_ours(url) from None


def fetch_models(url: str, key: str | None) -> list[dict[str, object]]:
    """All fields of the models. Raises as `served_models` does."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with _opener(url).open(request, timeout=TIMEOUT) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error.code, key) from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise MillstreamError(
            f"No server answers at {url} ({reason}). Start one with 'millstream serve MODEL', or name it with --url."
        ) from None
    try:
        models = [dict(fields) for fields in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        raise _not_ours(url) from None
    if not all("id" in fields and "state" in fields for fields in models):
        raise _not_ours(url)
    return models


def find_fields(models: Sequence[dict[str, object]], name: str) -> dict[str, object] | None:
    """The model of this name or alias."""
    for fields in models:
        aliases = fields.get("aliases")
        if name == fields["id"] or (isinstance(aliases, list) and name in aliases):
            return fields
    return None


def _not_ours(url: str) -> MillstreamError:
    return MillstreamError(f"The server at {url} is not Millstream: it does not list its models.")


def choose(models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
    """The wanted model, or the first of the most suitable ones: loaded, able to use tools, not failed."""
    if wanted:
        for model in models:
            if wanted == model.name or wanted in model.aliases:
                return model
        names = ", ".join(model.name for model in models) or "none"
        raise NotFound(f"The server has no model {wanted!r}. Its models: {names}.")
    usable = [model for model in models if model.state not in ("failed", "stopped")]
    if not usable:
        raise NotFound("The server has no model that works. Start it with one: 'millstream serve MODEL'.")
    return min(usable, key=lambda model: (model.state != "ready", "tools" not in model.capabilities))


def _model(fields: dict[str, object]) -> ServedModel:
    aliases, capabilities, context = (fields.get(name) for name in ("aliases", "capabilities", "context_length"))
    return ServedModel(
        name=str(fields["id"]),
        state=str(fields["state"]),
        aliases=tuple(aliases) if isinstance(aliases, list) else (),
        context_length=context if isinstance(context, int) else None,
        capabilities=tuple(capabilities) if isinstance(capabilities, list) else (),
    )


def _refused(url: str, status: int, key: str | None) -> MillstreamError:
    if status in (401, 403):
        problem = "does not accept this API key" if key else "requires an API key"
        return Unauthorized(f"The server at {url} {problem}: give it with --api-key or MILLSTREAM_API_KEY.")
    return MillstreamError(f"The server at {url} is not Millstream: it answers /v1/models with status {status}.")


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Through the proxy that the environment names, but never to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
