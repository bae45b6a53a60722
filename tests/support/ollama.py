"""Requests of Ollama's API and helpers for their answers."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT: dict[str, Any] = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": "org/tiny", "prompt": "hi"}
WHOLE = {"stream": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def asked(http: httpx.Client, service: Any, path: str, body: dict[str, Any]) -> Any:
    """The request that the service gets for a body."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return service.requests[-1]


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status and response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    message: str = response.json()["error"]
    return message
