"""What `millstream launch` knows of an agent, and what it starts it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

KEY_VARIABLE = "MILLSTREAM_API_KEY"
NO_KEY = "millstream"
"""Sent to a server that asks for no key: agents insist on one."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server and the model that the agent shall use."""

    url: str
    """Without a path and a final slash, such as `http://127.0.0.1:8000`."""
    model: str
    key: str = NO_KEY
    context_length: int | None = None
    """None: not known yet, because the model is not loaded."""
    sees_images: bool = False

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def output_tokens(self) -> int | None:
        """What one answer may take of the context: a quarter, so that the conversation has the rest."""
        return min(32_000, self.context_length // 4) if self.context_length else None


@dataclass(frozen=True, slots=True)
class Launch:
    """What the agent is started with. Files of the user are neither read nor written."""

    arguments: tuple[str, ...] = ()
    """They come before those of the user."""
    environment: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Variables of the user that would send the agent, or a key, elsewhere."""


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    command: str
    """The executable, to be found on PATH."""
    install: str
    """The command that installs it."""
    configure: Callable[[Target], Launch]
    prompt_tokens: int | None = None
    """About what its own prompt and tools take, measured on a first request."""
    default_arguments: tuple[str, ...] = ()
    """Used if the user gives none."""
