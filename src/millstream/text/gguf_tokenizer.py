"""Builds a tokenizer from the metadata of a GGUF file. The flags say what the caller adds around a prompt; nothing is
added by the tokenizer itself, because a chat template often writes the first token already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from millstream.errors import ModelError
from millstream.models.gguf_config import eos_token_ids
from millstream.models.gguf_file import GgufFile
from millstream.models.gguf_vocabulary import Vocabulary, read_vocabulary, text_value, token_id
from millstream.text.gguf_pretokenizers import EXPRESSIONS, GPT2, WHOLE_WORDS

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    notes: tuple[str, ...]


def gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """The tokenizer that the file describes."""
    try:
        return _tokenizer(file, read_vocabulary(file.metadata))
    except ModelError as error:
        raise ModelError(f"{file.path}: {error.message}") from error


def _tokenizer(file: GgufFile, words: Vocabulary) -> GgufTokenizer:
    metadata = file.metadata
    kind, pre = (str(metadata.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
    tokens = _unique(words.tokens)
    notes: list[str] = []
    if kind == "gpt2":
        tokenizer = _byte_level(words, tokens, pre, notes)
    elif kind in ("llama", "gemma4"):
        tokenizer = _sentencepiece(metadata, words, tokens, kind)
    else:
        raise ModelError(f"tokenizer {kind[:60] or 'missing'!r} is not served; gpt2, llama and gemma4 are.")
    _add_marked(tokenizer, words.types, tokens)
    begins = kind != "gpt2" or pre in WHOLE_WORDS
    return GgufTokenizer(
        tokenizer=tokenizer,
        chat_template=text_value(metadata, "tokenizer.chat_template"),
        bos_token=_named(metadata, tokens, "bos"),
        eos_token=_named(metadata, tokens, "eos"),
        eos_ids=eos_token_ids(metadata),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", begins)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        notes=tuple(notes),
    )


def _unique(tokens: tuple[str, ...]) -> list[str]:
    """The vocabulary. A repeated token is renamed: the ids after it must keep their places."""
    if not tokens:
        raise ModelError("has no vocabulary ('tokenizer.ggml.tokens'), so it cannot be served.")
    seen: set[str] = set()
    unique = []
    for number, token in enumerate(tokens):
        name = f"[{number}]" if token in seen or not token else token
        seen.add(name)
        unique.append(name)
    return unique


def _byte_level(words: Vocabulary, tokens: list[str], pre: str, notes: list[str]) -> Tokenizer:
    """GPT-2's kind: every byte has a printable stand-in, and words are cut by the family's expressions."""
    expressions = EXPRESSIONS.get(pre or "default", GPT2)
    if pre and pre not in EXPRESSIONS:
        notes.append(f"the GGUF file cuts words the way {pre!r}, which is not known here; cut as GPT-2 does instead")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocabulary, _written_merges(words.merges, vocabulary), ignore_merges=pre in WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    cuts: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], words: Vocabulary, tokens: list[str], kind: str) -> Tokenizer:
    """SentencePiece's kind: a space is written ▁, and a character without a token is spelled in bytes."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    written = kind == "gemma4"
    merges = _written_merges(words.merges, vocabulary) if written else _scored_merges(words, tokens, vocabulary)
    unknown = _named(metadata, tokens, "unknown") or tokens[0]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not written))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    if written:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _written_merges(lines: tuple[str, ...], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges in the file, without those that lead to no token. The space after the first character parts a pair."""
    merges: list[tuple[str, str]] = []
    for line in lines:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
    return merges


def _scored_merges(words: Vocabulary, tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Merges for a vocabulary that has scores instead: every cut of a token into two tokens, the best score first.

    Marked tokens take no part. They are found in the text beforehand.
    """
    if not words.scores:
        raise ModelError("has no scores of its tokens ('tokenizer.ggml.scores'), which such a vocabulary needs.")
    types = words.types
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == 1] if types else tokens
    pieces = set(plain)
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token in plain:
        score = words.scores[vocabulary[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((-score, vocabulary[left], vocabulary[right], (left, right)))
    merges.sort()
    return [pair for *_, pair in merges]


def _add_marked(tokenizer: Tokenizer, types: tuple[int, ...], tokens: list[str]) -> None:
    """Control tokens and the user's own are found in the text before anything else, each as one id."""
    control = [tokens[number] for number, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)]
    own = [tokens[number] for number, kind in enumerate(types) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _named(metadata: Mapping[str, Any], tokens: list[str], role: str) -> str | None:
    number = token_id(metadata, role, len(tokens))
    return None if number is None else tokens[number]
