"""Tools that run at a provider, such as web search. The model does not see them, and the log says so once."""

from __future__ import annotations

import logging
from collections.abc import Collection

from millstream.api.errors import printable

log = logging.getLogger(__name__)

MOST_TOLD = 100
"""Types that are named in the log: clients choose the names."""


class HostedTools:
    """Names each type of tools that are left out once in the log."""

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._told: set[str] = set()

    def tell(self, kinds: Collection[str]) -> None:
        for kind in sorted(set(kinds) - self._told)[: MOST_TOLD - len(self._told)]:
            self._told.add(kind)
            log.warning("The tool %s runs at %s only: models here do not see it.", printable(kind), self._provider)
