"""Tokenizers of the common families, trained quickly on a few sentences."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The mill stands by the stream, and the stream turns the mill.",
    "Das Mühlrad dreht sich; der Müller schläft nicht.",
    "水車は小川のそばにあります。小川が水車を回します。",
    "🌊🌊 water 👩‍👩‍👧 family 🇳🇴 flags — ½ × “quotes”\n\ttabs  and   spaces",
]


@cache
def byte_level_json() -> str:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen. `<|start|>` is its BOS token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 0)]
    )
    return tokenizer.to_str()


@cache
def byte_fallback_json(strip: bool = True) -> str:
    """SentencePiece BPE as in Llama 2 (`strip`) and Gemma: `▁` for spaces, and byte fallback for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        limit_alphabet=60,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    tokenizer.train_from_iterator(SENTENCES[:2], trainer)
    # The trainer marks the byte tokens as special, but in real files they are not.
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return tokenizer.to_str()


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(byte_level_json())


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    return Tokenizer.from_str(byte_fallback_json(strip))


def unigram() -> Tokenizer:
    """SentencePiece's other algorithm, as in T5: its vocabulary contains the control tokens, too."""
    letters = [(letter, -5.0) for letter in '▁abcdefghijklmnopqrstuvwxyz<>|/"{}[]:,0123456789']
    words = [("▁the", -3.0), ("mill", -3.0), ("<tool", -3.0)]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *letters, *words]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def merged_names() -> Tokenizer:
    """Byte-level BPE whose merges make the name of an added token."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<h", "<h>"]
    merges = [("<", "h"), ("<h", ">")]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<h>"])
    return tokenizer


@cache
def word_piece_json() -> str:
    """WordPiece as in BERT: the text of a token depends on its neighbours."""
    words = ["[UNK]", "[CLS]", "mill", "##stream", "water", ",", "##s", "the"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer.to_str()


def word_piece() -> Tokenizer:
    return Tokenizer.from_str(word_piece_json())
