"""An MCP server in a few lines, of an older version of the protocol. It starts at once: nothing is imported."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOLS = ("echo", "die", "big")
NO_METHOD = {"code": -32601, "message": "Method not found"}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": call(params["name"], params.get("arguments", {}))}]}
    return None


def call(name: str, arguments: dict[str, Any]) -> str:
    if name == "die":
        os._exit(3)
    return arguments["text"] if name == "echo" else "x" * arguments["size"]


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        outcome = {"error": NO_METHOD} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
