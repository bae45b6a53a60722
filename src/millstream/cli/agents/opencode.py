"""OpenCode, over OpenAI's chat API."""

from __future__ import annotations

import json
from typing import Any

from millstream.cli.agents.agent import KEY_VARIABLE, Agent, Launch, Target


def configure(target: Target) -> Launch:
    """OPENCODE_CONFIG_CONTENT is merged into the user's own configuration, for this run only."""
    model: dict[str, Any] = {"name": target.model, "tool_call": True}
    if target.context_length:
        model["limit"] = {"context": target.context_length, "output": target.output_tokens}
    if target.sees_images:
        model |= {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    name = f"millstream/{target.model}"
    content = {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {
            "millstream": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Millstream",
                "options": {"baseURL": target.openai_url, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {target.model: model},
            }
        },
    }
    return Launch(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(content), KEY_VARIABLE: target.key})


OPENCODE = Agent(
    name="opencode",
    command="opencode",
    install="npm install -g opencode-ai",
    configure=configure,
    prompt_tokens=7_000,
)
