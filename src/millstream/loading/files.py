"""Finds a model's files for a load, or downloads them: on a pool, with progress, and stopped with the load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from millstream.model_facts import LoadProgress
from millstream.models.last_used import mark_used
from millstream.models.source import ModelSource, is_demo, resolve
from millstream.service.managed_model import LoadContext


class FileSearch:
    """Made on the event loop; `find` runs on a thread, which soon ends once the search is cancelled."""

    def __init__(self, loading: LoadContext, report: Callable[[str], None]) -> None:
        self._loading = loading
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._cancelled = False

    def cancel(self) -> None:
        """The load is given up."""
        self._cancelled = True

    def find(self, spec: str | None, cache_dir: Path | None) -> ModelSource:
        """On any thread. Raises `LoadCancelled` after `cancel`."""
        source = resolve(
            spec,
            cache_dir=cache_dir,
            report=self._report,
            progress=self._progress,
            cancelled=lambda: self._cancelled,
        )
        if is_demo(spec) or (spec is not None and not Path(spec).expanduser().exists()):  # it is in a cache
            mark_used(source.path, cache_dir)
        return source

    def _progress(self, done: int, total: int) -> None:
        if not self._cancelled:
            progress = LoadProgress("downloading", done / total if total else 0.0, done, total)
            self._loop.call_soon_threadsafe(self._loading.report_progress, progress)
