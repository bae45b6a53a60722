"""Tokenizers of encoders: BERT's, RoBERTa's and Qwen's shapes, with small vocabularies."""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ("the", "mill", "stands", "by", "stream", "water", "drives", "wheel", "what", "bread", "is", "baked", "a")


def wordpiece(*, special: bool = True) -> Tokenizer:
    """Whole words and letters; `[CLS] … [SEP]`, and `[CLS] … [SEP] … [SEP]` for pairs, as BERT has them."""
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    return tokenizer


def without_types() -> Tokenizer:
    """RoBERTa's template: both texts have type 0, and two separators are between them."""
    tokenizer = wordpiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def chat_bytes() -> Tokenizer:
    """One token per byte, and Qwen's control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no"])
    return tokenizer
