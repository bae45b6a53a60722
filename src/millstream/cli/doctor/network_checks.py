"""The port of the server, proxies, and the settings of the hub."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from millstream.cli.doctor.finding import Finding, ok, warning
from millstream.cli.server_client import ServerClient
from millstream.errors import MillstreamError
from millstream.models.nearby import hub_cache

_LOCAL = ("localhost", "127.0.0.1")
_TRUE = ("1", "true", "yes", "on")
_ANSWER_SECONDS = 3.0


def check_network(port: int, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    yield check_port(port)
    yield from check_proxies(environment)
    yield from check_hub(environment)


def check_port(port: int) -> Finding:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ok("port", f"{port} is free")
    except OSError as error:
        reason = error.strerror or str(error)
    try:
        about = ServerClient(f"http://127.0.0.1:{port}").get("/", _ANSWER_SECONDS)
    except MillstreamError:
        about = None
    if isinstance(about, dict) and about.get("name") == "Millstream":
        return ok("port", f"Millstream {about.get('version')} is running at http://127.0.0.1:{port}")
    return warning(
        "port", f"Port {port} is taken by another program ({reason}). To see by which: lsof -i :{port}",
        f"millstream serve --port {port + 1 if port < 65535 else port - 1}",
    )  # fmt: skip


def check_proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    names = [
        name for name, value in environment.items() if name.lower() in ("http_proxy", "all_proxy") and value.strip()
    ]
    excluded = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    hosts = {host.strip().lower() for host in excluded.split(",")}
    missing = [] if "*" in hosts else [host for host in _LOCAL if host not in hosts]
    if names and missing:
        both = ",".join(filter(None, (excluded, *missing)))
        yield warning(
            "proxy",
            f"{' and '.join(names)} sends requests for this machine to a proxy as well: many clients then cannot "
            "reach the server.",
            f"export NO_PROXY={both} no_proxy={both}",
        )
    else:
        yield ok("proxy", "requests to this machine go there directly")


def check_hub(environment: Mapping[str, str]) -> Iterator[Finding]:
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_true(environment.get(name, ""))]
    if offline:
        yield warning("hub", f"{offline[0]} is set: no model can be downloaded.", f"unset {' '.join(offline)}")
        return
    endpoint = environment.get("HF_ENDPOINT")
    where = f"{endpoint}; " if endpoint else ""
    if environment.get("HF_TOKEN") or _token_file(environment).is_file():
        yield ok("hub", f"{where}a token is set")
    else:
        yield ok("hub", f"{where}no token: only needed for gated and private models (HF_TOKEN)")


def _token_file(environment: Mapping[str, str]) -> Path:
    configured = environment.get("HF_TOKEN_PATH")
    return Path(configured).expanduser() if configured else hub_cache().parent / "token"


def _is_true(value: str) -> bool:
    return value.strip().lower() in _TRUE
