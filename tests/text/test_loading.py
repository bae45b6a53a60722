"""Tokenizers from folders of every layout, and from GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizers import SENTENCES, byte_level, byte_level_json

from millstream.errors import ModelError
from millstream.models.source import ModelSource
from millstream.text.loading import load_tokenizer
from millstream.text.tokenizer import Tokenizer
from support.templates import encode_chat, render_chat

USER = [{"role": "user", "content": "Hi"}]


def folder_with(path: Path, **files: object) -> ModelSource:
    """A model folder. Keys are file names with `__` for the dot; strings are written as they are, the rest as JSON."""
    (path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return ModelSource("small", "folder", path)


def load(path: Path, **files: object) -> Tokenizer:
    return load_tokenizer(folder_with(path, **files))


def test_a_bare_tokenizer_file_is_enough(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[2])) == SENTENCES[2]
    assert tokenizer.template is None
    assert tokenizer.eos_ids == frozenset()


def test_eos_tokens_come_from_all_files(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        generation_config__json={"eos_token_id": [7, 8]},
        config__json={"eos_token_id": 9, "text_config": {"eos_token_id": 10}},
        tokenizer_config__json={"eos_token": {"content": "<|end|>", "lstrip": False}},
    )
    assert tokenizer.eos_ids == frozenset({1, 7, 8, 9, 10})
    assert tokenizer.eos_token == "<|end|>"


def test_missing_eos_tokens(tmp_path: Path) -> None:
    files = {"generation_config__json": {"eos_token_id": None}, "tokenizer_config__json": {"eos_token": None}}
    assert load(tmp_path, **files).eos_ids == frozenset()


def test_tokenizer_config_takes_precedence_over_the_special_tokens_map(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        special_tokens_map__json={"bos_token": "old", "pad_token": "<|end|>", "additional_special_tokens": ["x"]},
        tokenizer_config__json={"bos_token": "<|start|>", "chat_template": "{{ bos_token }}|{{ pad_token }}"},
    )
    assert render_chat(tokenizer, USER) == "<|start|>|<|end|>"


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": "right", "tokenizer_config__json": {"chat_template": "wrong"}},
        {"chat_template__json": {"chat_template": "right"}, "tokenizer_config__json": {"chat_template": "wrong"}},
        {"tokenizer_config__json": {"chat_template": "right"}},
        {
            "tokenizer_config__json": {
                "chat_template": [{"name": "rag", "template": "wrong"}, {"name": "default", "template": "right"}]
            }
        },
    ],
)
def test_templates_are_found_in_every_layout(tmp_path: Path, files: dict[str, object]) -> None:
    assert render_chat(load(tmp_path, **files), USER) == "right"


@pytest.mark.parametrize("name", ["tokenizer__json", "tokenizer_config__json", "generation_config__json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name.replace("__", r"\.")):
        load(tmp_path, **{name: '{"model": '})


def test_a_folder_without_any_tokenizer_says_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(ModelSource("small", "folder", tmp_path))


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_conversations_become_the_tokens_that_transformers_makes(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>", "eos_token": "<|end|>"}
    ours = load(tmp_path, tokenizer_config__json={**names, "chat_template": template})
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert encode_chat(ours, USER) == theirs.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert ours.encode("the mill") == theirs.encode("the mill")


def test_a_sentencepiece_file_alone_is_converted(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_tokenizer(ModelSource("small", "folder", tmp_path))
    ids = tokenizer.encode(SENTENCES[3])
    assert tokenizer.eos_ids == frozenset({2})
    assert ids[0] == 1
    assert tokenizer.decode(ids) == SENTENCES[3]


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (True, False), (False, False)])
def test_bos_and_eos_flags_of_a_gguf_file(tmp_path: Path, add_bos: bool, add_eos: bool) -> None:
    path = write_gguf(tmp_path / "small.gguf", add_bos=add_bos, add_eos=add_eos)
    tokenizer = load_tokenizer(ModelSource("small", "gguf", path))
    plain = byte_level().encode(SENTENCES[0], add_special_tokens=False).ids
    assert tokenizer.encode(SENTENCES[0]) == [0] * add_bos + plain + [1] * add_eos
    assert tokenizer.encode(SENTENCES[0], special=False) == plain
    assert tokenizer.eos_ids == frozenset({1})
    assert render_chat(tokenizer, USER) == "<|start|>Hi"
    assert tokenizer.decode([0, *plain, 1]) == SENTENCES[0]


def write_gguf(path: Path, *, add_bos: bool, add_eos: bool) -> Path:
    from gguf import GGUFWriter, TokenType

    model = json.loads(byte_level_json())["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([TokenType.CONTROL if index < 2 else TokenType.NORMAL for index in range(len(names))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.add_add_eos_token(add_eos)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
