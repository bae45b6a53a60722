"""`millstream launch`: start a coding agent that uses a running server."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from millstream.cli.agents import AGENTS
from millstream.cli.agents.agent import KEY_VARIABLE, NO_KEY, Agent, Launch, Target
from millstream.cli.parser import examples
from millstream.cli.served_models import ServedModel, choose, served_models
from millstream.cli.server_client import DEFAULT_URL, add_server_options
from millstream.errors import MillstreamError

SHORT_CONTEXT = 16_384
"""Agents whose prompt was not measured are warned about below this."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="start a coding agent that uses a running server",
        description="Start a coding agent that uses a running server. It is set up for this run only: by environment "
        "variables and options. Your own configuration files stay as they are.",
        usage="millstream launch AGENT [--model MODEL] [--url URL] [--api-key KEY] [--print] [-- ARGUMENTS]",
        epilog=examples(
            ("millstream launch claude", "Claude Code with the model of the running server"),
            ("millstream launch codex -- exec 'Fix the failing test'", "what follows -- goes to the agent"),
            ("millstream launch opencode --print", "only show what would be set and run"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("agent", choices=AGENTS, metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--model", help="model to use; default: a loaded one, preferably one that knows tools")
    add_server_options(parser)
    parser.add_argument("--print", action="store_true", dest="show", help="only show what would be set and run")


def run(arguments: argparse.Namespace) -> int:
    agent = AGENTS[arguments.agent]
    url = arguments.url or DEFAULT_URL
    model = choose(served_models(url, arguments.api_key), arguments.model)
    executable = None if arguments.show else _executable(agent)
    for warning in _warnings(agent, model):
        print(f"millstream: {warning}", file=sys.stderr)
    target = Target(
        url=url,
        model=model.name,
        key=arguments.api_key or NO_KEY,
        context_length=model.context_length,
        sees_images="vision" in model.capabilities,
    )
    launch = agent.configure(target)
    command = [agent.command, *launch.arguments, *(arguments.agent_arguments or agent.default_arguments)]
    if executable is not None:
        print(f"millstream: {agent.name} uses {model.name} at {target.url}", file=sys.stderr, flush=True)
        _become(executable, command, launch)
    print(_script(launch, command, target.key))
    return 0


def _become(executable: str, command: list[str], launch: Launch) -> NoReturn:
    """The agent replaces this process, so that the terminal and signals are its own."""
    environment = {name: value for name, value in os.environ.items() if name not in launch.unset}
    os.execve(executable, command, environment | launch.environment)


def _executable(agent: Agent) -> str:
    found = shutil.which(agent.command)
    if found is None:
        raise MillstreamError(f"{agent.command!r} is not on PATH. Install it with: {agent.install}")
    return found


def _warnings(agent: Agent, model: ServedModel) -> list[str]:
    warnings = []
    if model.state != "ready":
        warnings.append(f"{model.name} is not loaded: the agent's first request waits for it.")
    if model.capabilities and "tools" not in model.capabilities:
        warnings.append(f"{model.name} knows no tools: {agent.name} can talk to it, but it cannot act.")
    length = model.context_length
    if length is not None and agent.prompt_tokens and length < 2 * agent.prompt_tokens:
        warnings.append(
            f"The context length of {model.name} is {length} tokens, and the prompt of {agent.name} alone takes about "
            f"{agent.prompt_tokens}."
        )
    elif length is not None and not agent.prompt_tokens and length < SHORT_CONTEXT:
        warnings.append(f"The context length of {model.name} is {length} tokens: that is short for an agent.")
    return warnings


def _script(launch: Launch, command: Sequence[str], key: str) -> str:
    """What is set and run, for a shell. A real key is not shown."""

    def value(text: str) -> str:
        return f'"${KEY_VARIABLE}"' if text == key != NO_KEY else shlex.quote(text)

    lines = [f"unset {name}" for name in launch.unset]
    for name, text in launch.environment.items():
        if name != KEY_VARIABLE or key == NO_KEY:
            lines.append(f"export {name}={value(text)}")
    return "\n".join([*lines, shlex.join(command)])
