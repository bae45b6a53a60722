"""Loads a model's tokenizer with what belongs to it: template, names of special tokens, ends of an answer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from millstream.errors import ModelError
from millstream.models.files import check_file, read_optional_object, read_text
from millstream.models.source import ModelSource
from millstream.models.trust import copy_tokenizer_data
from millstream.text.regex_guard import check_expressions
from millstream.text.tokenizer import Tokenizer

_NEEDED = "A model folder needs tokenizer.json, or the sentencepiece file that its tokenizer can be built from"

# What transformers raises for a folder that it cannot make a tokenizer of; it has no error of its own for that.
_CONVERSION_FAILURES = (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError)


_SPARE_IDS = 2**16
"""Numbers of tokens need not be without gaps, but grammars take memory for all below the highest."""


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model that is on this machine. Raises `ModelError` if there is none that can be read."""
    with _Reading(source.path):
        return _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.path)


def _from_folder(folder: Path) -> Tokenizer:
    settings = read_optional_object(folder / "special_tokens_map.json")
    settings |= read_optional_object(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    _check_ids(folder, backend)
    check_expressions(backend)
    special = {key: name for key, value in settings.items() if key.endswith("_token") and (name := _token_name(value))}
    bos, eos = special.pop("bos_token", None), special.pop("eos_token", None)
    return Tokenizer(
        backend,
        chat_template=_chat_template(folder, settings),
        bos_token=bos,
        eos_token=eos,
        eos_ids=_eos_ids(folder, backend, eos),
        special_tokens=special,
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _converted(folder)
    check_file(path)
    with _Reading(path):
        return tokenizers.Tokenizer.from_file(str(path))


class _Reading:
    """Names the file in what `tokenizers` raises: for all that it cannot read, `Exception` itself and no subclass, and
    where its Rust code panics an exception that no `except Exception` sees."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise ModelError(f"{self._path}: the tokenizer cannot be read: {error}. {_NEEDED}") from error


def _check_ids(folder: Path, backend: tokenizers.Tokenizer) -> None:
    ids = backend.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise ModelError(f"{folder}: the tokenizer has no tokens. {_NEEDED}")
    if max(ids) > 8 * len(ids) + _SPARE_IDS:
        raise ModelError(f"{folder}: the tokenizer has {len(ids)} tokens, and one of them has the number {max(ids)}")


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """Through transformers, which knows how each family's sentencepiece file becomes a tokenizer. Slow to import. It
    gets a copy that leads to no code: the class that `auto_map` names is another way to read the same vocabulary."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        with tempfile.TemporaryDirectory(prefix="millstream-tokenizer-") as copy:
            copy_tokenizer_data(folder, Path(copy))
            made = AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
    except _CONVERSION_FAILURES as error:
        raise ModelError(f"{folder} has no tokenizer.json, and none can be built: {error}. {_NEEDED}") from error
    if not isinstance(made, PreTrainedTokenizerFast):
        raise ModelError(f"{folder} has no tokenizer.json, and {type(made).__name__} cannot be turned into one")
    return made.backend_tokenizer


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own goes before the tokenizer's settings, as the newer layout does."""
    path = folder / "chat_template.jinja"
    if path.is_symlink() or path.exists():
        return read_text(path)
    template = read_optional_object(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> set[int]:
    """Every end that any of the files names: models are often published with only one of them complete."""
    config = read_optional_object(folder / "config.json")
    generation = read_optional_object(folder / "generation_config.json")
    text = config.get("text_config")
    ids: set[int] = set()
    for name, place in (("generation_config", generation), ("config", config), ("config", text)):
        value = place.get("eos_token_id") if isinstance(place, dict) else None
        for one in value if isinstance(value, list) else [value]:
            if one is not None and type(one) is not int:
                raise ModelError(f"{folder / name}.json: eos_token_id has {one!r:.60}; the number of a token is needed")
            if one is not None and one >= 0:
                ids.add(one)
    named = backend.token_to_id(eos_token) if eos_token else None
    return ids if named is None else ids | {named}


def _token_name(value: object) -> str | None:
    """Settings write a token as its name, or as an object with flags around it."""
    match value:
        case str(name) | {"content": str(name)}:
            return name
        case _:
            return None


def _from_gguf(path: Path) -> Tokenizer:
    from millstream.models.gguf_file import open_gguf
    from millstream.text.gguf_tokenizer import gguf_tokenizer

    parts = gguf_tokenizer(open_gguf(path))
    around = (parts.bos_token if parts.add_bos else None, parts.eos_token if parts.add_eos else None)
    _surround(parts.tokenizer, *around)
    return Tokenizer(
        parts.tokenizer,
        chat_template=parts.chat_template,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        eos_ids=parts.eos_ids,
        notes=parts.notes,
    )


def _surround(backend: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Have the tokenizer put these tokens around a text, as a tokenizer.json says it in its post-processor."""
    named = [(token, backend.token_to_id(token)) for token in (begin, end) if token is not None]
    if named:
        one = [token for token in (begin, "$A", end) if token is not None]
        pair = [token for token in (begin, "$A", "$B", end) if token is not None]
        backend.post_processor = TemplateProcessing(single=one, pair=pair, special_tokens=named)
