"""Codex, over OpenAI's Responses API."""

from __future__ import annotations

import json

from millstream.cli.agents.agent import KEY_VARIABLE, Agent, Launch, Target


def configure(target: Target) -> Launch:
    """Options of this run only (`-c`): a provider beside those of the user's configuration."""
    options: dict[str, str | int] = {
        "model": target.model,
        "model_provider": "millstream",
        "model_providers.millstream.name": "Millstream",
        "model_providers.millstream.base_url": target.openai_url,
        "model_providers.millstream.wire_api": "responses",
        "model_providers.millstream.env_key": KEY_VARIABLE,
        # a web search of OpenAI's servers: not to be had here
        "web_search": "disabled",
    }
    if target.context_length:
        options["model_context_window"] = target.context_length
    # JSON's strings and integers are TOML's too
    arguments = [part for name, value in options.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(arguments=tuple(arguments), environment={KEY_VARIABLE: target.key})


CODEX = Agent(
    name="codex",
    command="codex",
    install="npm install -g @openai/codex",
    configure=configure,
    prompt_tokens=9_000,
)
