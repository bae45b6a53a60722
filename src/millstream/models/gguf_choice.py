"""Chooses a GGUF file of a repository: by name, or by quantisation as in `org/name:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from millstream.errors import ModelError

_TAG = re.compile(r"(?:^|[-._/])((?:UD-)?I?Q\d\w*|BF16|F16|F32|MXFP4\w*)\.gguf$", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def gguf_files(names: Iterable[str]) -> list[str]:
    """The GGUF files that are models: projectors of vision models and parts of split files are not."""
    return sorted(
        name
        for name in names
        if name.lower().endswith(".gguf") and not _PART.search(name) and "mmproj" not in name.lower()
    )


def tag_of(name: str) -> str | None:
    """`Q4_K_M` for `model-Q4_K_M.gguf`; None if the name does not say."""
    match = _TAG.search(name)
    return match[1] if match else None


def choose_gguf(repo: str, names: Sequence[str], *, file: str | None = None, tag: str | None = None) -> str:
    """The file that is meant. Without `file` and `tag`, the only one. Raises `ModelError` with what there is."""
    found = gguf_files(names)
    wanted = file or (f"with {tag}" if tag else None)
    if file is not None:
        matches = [name for name in found if name == file]
    elif tag is not None:
        matches = [name for name in found if (tag_of(name) or "").lower() == tag.lower()]
    else:
        matches = found
    if len(matches) == 1:
        return matches[0]
    if not found:
        parts = any(_PART.search(name) for name in names)
        reason = "only GGUF files that are split into parts, which cannot be served" if parts else "no GGUF file"
        raise ModelError(f"{repo} has {reason}")
    raise ModelError(
        f"{repo} has {'several GGUF files' if matches else f'no GGUF file {wanted}'}; choose one of: "
        + ", ".join(_ways(repo, found))
    )


def _ways(repo: str, names: Sequence[str]) -> list[str]:
    """How to name each file: by its tag if no other file has the same."""
    tags = [tag_of(name) for name in names]
    return [
        f"{repo}:{tag}" if tag is not None and tags.count(tag) == 1 else f"{repo}/{name}"
        for name, tag in zip(names, tags, strict=True)
    ]
