"""Keys for one session: a server of the user's asks for one and gives it to a browser, in place of its own key."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from millstream.realtime_types import ClientSecret, SessionConfig

MAX_SECRETS = 1_000
"""The oldest give way."""
PREFIX = "ek_"


class ClientSecrets:
    """In memory alone: they live for minutes."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._issued: dict[str, ClientSecret] = {}

    def issue(self, config: SessionConfig, seconds: int) -> ClientSecret:
        now = self._clock()
        self._issued = {value: issued for value, issued in self._issued.items() if issued.expires_at > now}
        while len(self._issued) >= MAX_SECRETS:
            del self._issued[next(iter(self._issued))]
        made = ClientSecret(PREFIX + secrets.token_hex(24), int(now) + seconds, config)
        self._issued[made.value] = made
        return made

    def find(self, value: str) -> SessionConfig | None:
        """The settings that it was issued for. It opens any number of sessions until it expires."""
        issued = self._issued.get(value)
        return issued.config if issued is not None and issued.expires_at > self._clock() else None
