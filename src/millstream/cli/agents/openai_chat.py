"""Agents that take an OpenAI-compatible server from their environment: Qwen Code, aider, goose."""

from __future__ import annotations

from millstream.cli.agents.agent import Agent, Launch, Target


def _qwen(target: Target) -> Launch:
    return Launch(
        arguments=("--auth-type", "openai", "--openai-base-url", target.openai_url, "--model", target.model),
        environment={
            "OPENAI_BASE_URL": target.openai_url,
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
        },
    )


def _aider(target: Target) -> Launch:
    return Launch(
        # the warning is about models that aider has no prices for
        arguments=("--model", f"openai/{target.model}", "--no-show-model-warnings"),
        environment={"OPENAI_API_BASE": target.openai_url, "OPENAI_API_KEY": target.key},
    )


def _goose(target: Target) -> Launch:
    environment = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "OPENAI_HOST": target.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": target.key,
    }
    if target.context_length:
        environment["GOOSE_CONTEXT_LIMIT"] = str(target.context_length)
    return Launch(environment=environment, unset=("OPENAI_BASE_URL",))


QWEN = Agent(
    name="qwen",
    command="qwen",
    install="npm install -g @qwen-code/qwen-code",
    configure=_qwen,
    prompt_tokens=16_000,
)
AIDER = Agent(name="aider", command="aider", install="python -m pip install aider-chat", configure=_aider)
GOOSE = Agent(
    name="goose",
    command="goose",
    install="brew install block-goose-cli",
    configure=_goose,
    default_arguments=("session",),
)
