"""Claude Code, over Anthropic's API."""

from __future__ import annotations

import json

from millstream.cli.agents.agent import NO_KEY, Agent, Launch, Target

_HOUR_IN_MS = 3_600_000


def configure(target: Target) -> Launch:
    """The same settings go into the environment and into `--settings`: what the user's own settings file sets would
    override the environment. A real key stays out of the arguments, which other users can read."""
    settings = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_MODEL": target.model,
        # every choice of a model, and helpers such as the one that writes titles, must end at a model that exists
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "ANTHROPIC_SMALL_FAST_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # this header changes with each conversation, and would be the first thing of every prompt
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # a long prompt may take minutes before its first token
        "API_TIMEOUT_MS": str(_HOUR_IN_MS),
    }
    if target.context_length and target.output_tokens:
        settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context_length)
        settings["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.output_tokens)
    key = {"ANTHROPIC_AUTH_TOKEN": target.key}
    shown = settings | key if target.key == NO_KEY else settings
    return Launch(
        arguments=("--settings", json.dumps({"env": shown})),
        environment=settings | key,
        unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
    )


CLAUDE = Agent(
    name="claude",
    command="claude",
    install="npm install -g @anthropic-ai/claude-code",
    configure=configure,
    prompt_tokens=18_000,
)
