"""Finds a model's files for a load, or downloads them: on a pool, with progress, and stopped with the load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from millstream.errors import ModelError
from millstream.model_facts import LoadProgress
from millstream.models.cached_models import cached_models
from millstream.models.last_used import mark_used
from millstream.models.source import ModelSource, is_demo, resolve
from millstream.models.suggestions import did_you_mean
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
        try:
            source = resolve(
                spec,
                cache_dir=cache_dir,
                report=self._report,
                progress=self._progress,
                cancelled=lambda: self._cancelled,
            )
        except ModelError as error:
            if not (hint := _hint(spec, cache_dir)):
                raise
            raise ModelError(f"{error.message.rstrip('.')}.{hint}") from error
        if is_demo(spec) or (spec is not None and not Path(spec).expanduser().exists()):  # it is in a cache
            mark_used(source.path, cache_dir)
        return source

    def _progress(self, done: int, total: int) -> None:
        if not self._cancelled:
            progress = LoadProgress("downloading", done / total if total else 0.0, done, total)
            self._loop.call_soon_threadsafe(self._loading.report_progress, progress)


def _hint(spec: str | None, cache_dir: Path | None) -> str:
    """Models on this machine whose names are like one that was not found."""
    if spec is None or Path(spec).expanduser().exists():
        return ""
    names = [model.name for model in cached_models(cache_dir) if model.is_complete]
    return "" if spec in names else did_you_mean(spec, names)
