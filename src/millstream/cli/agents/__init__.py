"""The agents that `millstream launch` can start. A new one is an `Agent` and an entry here."""

from __future__ import annotations

from millstream.cli.agents.agent import Agent
from millstream.cli.agents.claude import CLAUDE
from millstream.cli.agents.codex import CODEX
from millstream.cli.agents.openai_chat import AIDER, GOOSE, QWEN
from millstream.cli.agents.opencode import OPENCODE

AGENTS: dict[str, Agent] = {agent.name: agent for agent in (CLAUDE, CODEX, OPENCODE, QWEN, AIDER, GOOSE)}
