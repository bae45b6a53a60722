"""Tells the progress of loads: in a live line of a terminal, or in the log when a load takes longer than seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from millstream.model_facts import LoadProgress
from millstream.models.transfer import Transfer

log = logging.getLogger(__name__)

Loads = Callable[[], Sequence[tuple[str, LoadProgress]]]
"""The names of the models that are being loaded, and how far they are."""
Show = Callable[[str], None]
"""Shows a line in place of the last one; an empty one for none."""

LOOK_SECONDS = 0.2
LINE_SECONDS = 4.0
"""Without a terminal: seconds between two lines about the same load, and before the first one."""


class LoadWatch:
    """Looks at the loads now and then. `show`: for a terminal; without it, lines go to the log."""

    def __init__(self, loads: Loads, show: Show | None, now: Callable[[], float] = time.monotonic) -> None:
        self._loads = loads
        self._show = show
        self._now = now
        self._told: dict[str, float] = {}
        """When a line about each load was logged, or when it began."""
        self._transfers: dict[str, Transfer] = {}

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self.look()
        finally:
            if self._show is not None:
                self._show("")

    def look(self) -> None:
        loads = self._loads()
        texts = {name: self._text(name, progress) for name, progress in loads}
        for ended in self._told.keys() - texts.keys():
            del self._told[ended]
            self._transfers.pop(ended, None)
        if self._show is not None:
            self._told = dict.fromkeys(texts, 0.0)
            self._show("; ".join(f"{name}: {text}" for name, text in texts.items()))
            return
        now = self._now()
        for name, text in texts.items():
            if now - self._told.setdefault(name, now) >= LINE_SECONDS:
                self._told[name] = now
                log.info("%s: %s", name, text)

    def _text(self, name: str, progress: LoadProgress) -> str:
        if progress.total_bytes:
            transfer = self._transfers.setdefault(name, Transfer())
            transfer.update(progress.done_bytes, progress.total_bytes)
            return f"{progress.phase}: {transfer.text}"
        if progress.phase == "starting":
            return "starting: its files, tokenizer and engine"
        return f"{progress.phase}: {progress.share:.0%}".replace("%", " %")
