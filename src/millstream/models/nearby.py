"""Names of models that are on this machine, to suggest one of them for a misspelt one. Reads folders only."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

_REPOSITORY = "models--"
_MODEL_SUFFIX = ".gguf"
_MAX_ENTRIES = 2000


def hub_cache() -> Path:
    """The folder of the hub client's cache, by its own variables. The client itself takes a second to import."""
    if configured := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(configured).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def cached_ids(cache: Path | None = None) -> list[str]:
    """The hub ids in the cache, complete or not."""
    names = (path.name for path in _entries(cache or hub_cache()) if path.name.startswith(_REPOSITORY))
    return sorted(name.removeprefix(_REPOSITORY).replace("--", "/", 1) for name in names)


def local_names(cache: Path | None = None) -> list[str]:
    """Hub ids in the cache, and model folders and files in the current folder."""
    here = [path for path in _entries(Path()) if path.suffix == _MODEL_SUFFIX or (path / "config.json").is_file()]
    return [*cached_ids(cache), *sorted(path.name for path in here)]


def suggestion(wrong: str, cache: Path | None = None) -> str:
    """` Did you mean ...?`, if something on this machine has a name like it. Else empty. `cache`: the hub's, if it is
    not the client's own."""
    names = [name for name in local_names(cache) if name != wrong]
    return _question(_near_siblings(wrong) or nearest_names(wrong, names))


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """` Did you mean ...?`, if one of these names is like it. Else empty."""
    return _question(nearest_names(wrong, known))


def _question(names: list[str]) -> str:
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _near_siblings(wrong: str) -> list[str]:
    """Folders and files beside a path that does not exist, with a name like its own."""
    path = Path(wrong)
    folder = path.expanduser().parent
    if folder == Path():
        return []
    names = [entry.name for entry in _entries(folder) if entry.suffix == _MODEL_SUFFIX or entry.is_dir()]
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)]


def nearest_names(wrong: str, known: Iterable[str]) -> list[str]:
    """At most three, best first: like the whole name, like the part after the slash, or like how that begins."""
    whole = {name.lower(): name for name in known}
    short = {name.rsplit("/", 1)[-1]: original for name, original in whole.items()}
    end = wrong.lower().rsplit("/", 1)[-1]
    starts = {name[: len(end) + 1]: original for name, original in short.items()}
    found = []
    for word, names, cutoff in ((wrong.lower(), whole, 0.7), (end, short, 0.7), (end, starts, 0.8)):
        found += [names[near] for near in difflib.get_close_matches(word, names, n=3, cutoff=cutoff)]
    return list(dict.fromkeys(found))[:3]


def _entries(folder: Path) -> list[Path]:
    """At most some thousand entries; none if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
    except OSError:
        return []
