"""Loads a model's tokenizer, with its chat template, special tokens and EOS tokens."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from millstream.errors import ModelError
from millstream.models.files import check_file, read_optional_object, read_text
from millstream.models.source import ModelSource
from millstream.models.trust import copy_tokenizer_data
from millstream.text.regex_guard import check_regexes
from millstream.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from millstream.text.gguf_tokenizer import GgufTokenizer

_HINT = "A model folder needs a tokenizer.json, or the SentencePiece file that it can be built from"

# What transformers raises if it cannot build a tokenizer; it has no error class for that.
_CONVERSION_FAILURES = (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, RuntimeError)


_MAX_ID_GAP = 2**16
"""Token ids may have gaps, but grammars take memory for every id up to the highest."""


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Loads the tokenizer of a local model. Raises `ModelError` if it is missing or cannot be read."""
    with _TokenizerErrors(source.path):
        return _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.path)


def load_backend(source: ModelSource) -> tokenizers.Tokenizer:
    """Loads the tokenizer itself, for models without conversations."""
    if source.kind == "gguf":
        return _gguf_parts(source.path).tokenizer
    backend = _read_backend(source.path)
    _check_ids(source.path, backend)
    check_regexes(backend)
    return backend


def read_chat_template(source: ModelSource) -> str | None:
    """Reads the chat template alone: that is cheap, and a tokenizer is not."""
    if source.kind == "folder":
        return _chat_template(source.path, read_optional_object(source.path / "tokenizer_config.json"))
    from millstream.models.gguf_file import open_gguf
    from millstream.models.gguf_vocabulary import text_value

    return text_value(open_gguf(source.path).metadata, "tokenizer.chat_template")


def _from_folder(folder: Path) -> Tokenizer:
    settings = read_optional_object(folder / "special_tokens_map.json")
    settings |= read_optional_object(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    _check_ids(folder, backend)
    check_regexes(backend)
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
        return _convert(folder)
    check_file(path)
    with _TokenizerErrors(path):
        return tokenizers.Tokenizer.from_file(str(path))


class _TokenizerErrors:
    """Context manager that converts errors of `tokenizers` to `ModelError`, and adds the file's name.

    `tokenizers` raises `Exception` itself for every file that it cannot read. If its Rust code panics, it raises an
    exception that is not a subclass of `Exception`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise ModelError(f"{self._path}: the tokenizer cannot be read: {error}. {_HINT}") from error


def _check_ids(folder: Path, backend: tokenizers.Tokenizer) -> None:
    ids = backend.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise ModelError(f"{folder}: the tokenizer has no tokens. {_HINT}")
    if max(ids) > 8 * len(ids) + _MAX_ID_GAP:
        raise ModelError(
            f"{folder}: the tokenizer has {len(ids)} tokens, but one of them has the id {max(ids)}. "
            "Token ids must not have such large gaps"
        )


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Converts a SentencePiece file with transformers, which knows the rules of each family but is slow to import.

    It works on a copy of the folder that cannot lead to code: `auto_map` would only name another class for the same
    vocabulary.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        with tempfile.TemporaryDirectory(prefix="millstream-tokenizer-") as copy:
            copy_tokenizer_data(folder, Path(copy))
            made = AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
    except _CONVERSION_FAILURES as error:
        raise ModelError(f"{folder} has no tokenizer.json, and none can be built: {error}. {_HINT}") from error
    if not isinstance(made, PreTrainedTokenizerFast):
        raise ModelError(
            f"{folder} has no tokenizer.json, and {type(made).__name__} cannot be converted to one. {_HINT}"
        )
    return made.backend_tokenizer


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Returns the chat template. A separate file takes precedence over tokenizer_config.json, as in newer layouts."""
    path = folder / "chat_template.jinja"
    if path.is_symlink() or path.exists():
        return read_text(path)
    template = read_optional_object(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = (each for each in template if isinstance(each, dict) and each.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> set[int]:
    """Returns the EOS tokens of all files together: many models are published with only one of them complete."""
    config = read_optional_object(folder / "config.json")
    generation = read_optional_object(folder / "generation_config.json")
    text = config.get("text_config")
    ids: set[int] = set()
    for name, values in (("generation_config", generation), ("config", config), ("config", text)):
        value = values.get("eos_token_id") if isinstance(values, dict) else None
        for one in value if isinstance(value, list) else [value]:
            if one is not None and type(one) is not int:
                raise ModelError(f"{folder / name}.json: eos_token_id is {one!r:.60}; it must be a token id")
            if one is not None and one >= 0:
                ids.add(one)
    named = backend.token_to_id(eos_token) if eos_token else None
    return ids if named is None else ids | {named}


def _token_name(value: object) -> str | None:
    """Returns a token's name, which is written as a string or as an object with flags."""
    match value:
        case str(name) | {"content": str(name)}:
            return name
        case _:
            return None


def _gguf_parts(path: Path) -> GgufTokenizer:
    from millstream.models.gguf_file import open_gguf
    from millstream.text.gguf_tokenizer import gguf_tokenizer

    parts = gguf_tokenizer(open_gguf(path))
    around = (parts.bos_token if parts.add_bos else None, parts.eos_token if parts.add_eos else None)
    _add_around(parts.tokenizer, *around)
    return parts


def _from_gguf(path: Path) -> Tokenizer:
    parts = _gguf_parts(path)
    return Tokenizer(
        parts.tokenizer,
        chat_template=parts.chat_template,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
        eos_ids=parts.eos_ids,
        notes=parts.notes,
    )


def _add_around(backend: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Makes the tokenizer add these tokens around a text, as the post-processor of a tokenizer.json does."""
    named = [(token, backend.token_to_id(token)) for token in (begin, end) if token is not None]
    if named:
        one = [token for token in (begin, "$A", end) if token is not None]
        pair = [token for token in (begin, "$A", "$B", end) if token is not None]
        backend.post_processor = TemplateProcessing(single=one, pair=pair, special_tokens=named)
