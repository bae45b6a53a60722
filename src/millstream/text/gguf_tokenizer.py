"""Builds a tokenizer from the metadata of a GGUF file.

The flags `add_bos` and `add_eos` say what the caller adds around a text. The tokenizer itself adds nothing, because
chat templates often write BOS themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from millstream.errors import ModelError
from millstream.models.gguf_config import eos_token_ids
from millstream.models.gguf_file import GgufFile
from millstream.models.gguf_vocabulary import Vocabulary, read_vocabulary, text_value, token_id
from millstream.text.gguf_pretokenizers import GPT2, IGNORE_MERGES, REGEXES

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer, and what else its GGUF file says about text."""

    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    notes: tuple[str, ...]


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Builds the tokenizer that the file describes. Raises `ModelError` if its kind is not supported."""
    try:
        return _tokenizer(file, read_vocabulary(file.metadata))
    except ModelError as error:
        raise ModelError(f"{file.path}: {error.message}") from error


def _tokenizer(file: GgufFile, source: Vocabulary) -> GgufTokenizer:
    metadata = file.metadata
    kind, pre = (str(metadata.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
    tokens = _unique(source.tokens)
    notes: list[str] = []
    if kind == "gpt2":
        tokenizer = _byte_level(source, tokens, pre, notes)
    elif kind in ("llama", "gemma4"):
        tokenizer = _sentencepiece(metadata, source, tokens, kind)
    else:
        raise ModelError(f"the tokenizer type {kind[:60] or 'missing'!r} is not supported; gpt2, llama and gemma4 are.")
    _add_special_tokens(tokenizer, source.types, tokens)
    adds_bos = kind != "gpt2" or pre in IGNORE_MERGES
    return GgufTokenizer(
        tokenizer=tokenizer,
        chat_template=text_value(metadata, "tokenizer.chat_template"),
        bos_token=_token_of_role(metadata, tokens, "bos"),
        eos_token=_token_of_role(metadata, tokens, "eos"),
        eos_ids=eos_token_ids(metadata),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        notes=tuple(notes),
    )


def _unique(tokens: tuple[str, ...]) -> list[str]:
    """Returns the vocabulary. Empty and repeated tokens are renamed, so that all ids stay the same."""
    if not tokens:
        raise ModelError("the file has no vocabulary: the field 'tokenizer.ggml.tokens' is missing or empty.")
    seen: set[str] = set()
    unique = []
    for number, token in enumerate(tokens):
        name = f"[{number}]" if token in seen or not token else token
        seen.add(name)
        unique.append(name)
    return unique


def _byte_level(source: Vocabulary, tokens: list[str], pre: str, notes: list[str]) -> Tokenizer:
    """Builds a byte-level BPE tokenizer like GPT-2's, with the family's pre-tokenizer."""
    expressions = REGEXES.get(pre or "default", GPT2)
    if pre and pre not in REGEXES:
        notes.append(f"the GGUF file names the pre-tokenizer {pre!r}, which is unknown; GPT-2's is used instead")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocabulary, _file_merges(source.merges, vocabulary), ignore_merges=pre in IGNORE_MERGES)
    tokenizer = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], source: Vocabulary, tokens: list[str], kind: str) -> Tokenizer:
    """Builds a SentencePiece tokenizer: spaces are written as ▁, and characters without a token as bytes."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    has_merges = kind == "gemma4"
    merges = _file_merges(source.merges, vocabulary) if has_merges else _scored_merges(source, tokens, vocabulary)
    unknown = _token_of_role(metadata, tokens, "unknown") or tokens[0]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not has_merges))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    if has_merges:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _file_merges(lines: tuple[str, ...], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges in the file, without those that lead to no token.

    The first space that is not the first character separates the pair.
    """
    merges: list[tuple[str, str]] = []
    for line in lines:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
    return merges


def _scored_merges(source: Vocabulary, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns merges for a vocabulary that has scores instead: every split of a token into two, best score first.

    Control and user-defined tokens are left out: they are matched before any merge.
    """
    if not source.scores:
        raise ModelError("the file has no token scores ('tokenizer.ggml.scores'), which a llama tokenizer needs.")
    types = source.types
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == 1] if types else tokens
    pieces = set(plain)
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token in plain:
        score = source.scores[vocabulary[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, vocabulary[left], vocabulary[right], (left, right)))
    merges.sort()
    return [pair for *_, pair in merges]


def _add_special_tokens(tokenizer: Tokenizer, types: tuple[int, ...], tokens: list[str]) -> None:
    """Adds control and user-defined tokens, which are matched in the text before anything else."""
    control = [tokens[number] for number, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)]
    user_defined = [tokens[number] for number, kind in enumerate(types) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _token_of_role(metadata: Mapping[str, Any], tokens: list[str], role: str) -> str | None:
    number = token_id(metadata, role, len(tokens))
    return None if number is None else tokens[number]
