"""A whole server with MCP servers and a store on disk: ready without them, and a restart finds what was stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millstream.config import Settings
from millstream.errors import ModelError
from millstream.server import serve
from millstream.service.store.directory import KEY_FILE
from support.mcp_clients import shell_spec, stdio_spec
from support.server import RunningServer, running

SILENT = "cat > /dev/null # silent-mcp-server"


def servers(server: RunningServer) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/v1/mcp/servers", timeout=60)
    return {card["label"]: card for card in answer.json()["data"]}


def test_a_server_with_tools_and_a_store(servable: Path, tmp_path: Path) -> None:
    tools = (stdio_spec("real"), shell_spec("silent", SILENT), shell_spec("broken", "exit 1"))
    settings = Settings(models=(str(servable),), port=0, store_dir=tmp_path, tool_servers=tools)
    with running(settings) as server:
        # The model is ready; a tool server that never answers has kept nobody waiting.
        assert httpx.get(f"{server.url}/health", timeout=60).json()["status"] == "ok"
        assert servers(server)["silent"]["state"] == "starting"
        found = server.call(lambda s: s.mill.services.tool_servers.tools("real"))
        card = servers(server)["real"]
        assert card["state"] == "ready"
        assert [tool["name"] for tool in card["tools"]] == [tool.name for tool in found]
        assert servers(server)["broken"]["state"] == "failed"
        output = server.call(lambda s: s.mill.services.tool_servers.call("real", "pid", {}))
        server.call(lambda s: s.mill.services.records.put("resp_1", b"stored"))
        sealed = server.call(lambda s: s.mill.services.seal.seal("thoughts"))
        began = time.monotonic()
        server.stop_soon()
        assert server.join() == (0, True)
        assert time.monotonic() - began < 30
    assert not psutil.pid_exists(int(output.text))
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in alive if any(SILENT in word for word in p.cmdline())]
    with running(Settings(models=(str(servable),), port=0, store_dir=tmp_path)) as server:
        assert server.call(lambda s: s.mill.services.records.get("resp_1")) == b"stored"
        assert server.call(lambda s: s.mill.services.seal.open(sealed)) == "thoughts"
        assert servers(server) == {}


def test_a_broken_key_stops_the_start(servable: Path, tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with pytest.raises(ModelError, match="is not a key"):
        serve(Settings(models=(str(servable),), port=0, store_dir=tmp_path))
