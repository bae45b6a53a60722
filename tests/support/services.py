"""The services of an app, from one fake that generates and knows models."""

from __future__ import annotations

from typing import Any

from millstream.service.activity import Activities
from millstream.service.history import History
from millstream.service.hub import ModelHub
from millstream.service.journal import Journal
from millstream.service.mcp.servers import McpServers
from millstream.service.ports import Services
from millstream.service.realtime.service import RealtimeSessions
from millstream.service.realtime.session import SessionServices
from millstream.service.server_state import StateOperations
from millstream.service.store.memory import MemoryRecords
from millstream.service.store.seal import SecretKeySeal


def services(service: Any, **others: Any) -> Services:
    parts = {
        "seal": SecretKeySeal(b"k" * 32),
        "records": MemoryRecords(max_bytes=10**6, max_age=60.0),
        "tool_servers": McpServers(()),
        "state": StateOperations(ModelHub(), Journal(), History(lambda: (), Activities())),
    }
    kinds = dict.fromkeys(("models", "generation", "encoding", "transcription", "speech"), service)
    parts = kinds | parts | others
    if "realtime" not in parts:
        used = SessionServices(parts["generation"], parts["transcription"], parts["speech"])
        parts["realtime"] = RealtimeSessions(parts["models"], used)
    return Services(**parts)
