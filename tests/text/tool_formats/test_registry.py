"""Detection of the chat format from a model's template and vocabulary."""

from __future__ import annotations

import pytest

from millstream.errors import ModelError
from millstream.text.chat_format import REASONING, detect_chat_format

TEMPLATES = [
    ('<tool_call>{"name": 1, "arguments": 2}</tool_call> <think> </think>', "hermes", "think"),
    ("<tool_call><function=f><parameter=a>", "qwen3-coder", "none"),
    ("<tool_call>f<arg_key>a</arg_key> '<think>' '</think>'", "glm", "think"),
    ("<|start_header_id|>ipython {\"name\": 1, \"parameters\": 2} <|python_tag|>", "llama", "none"),
    ("<|python_start|>[f()]<|python_end|>", "pythonic", "none"),
    ("<|tool_list_start|>", "lfm2", "none"),
    ("[TOOL_CALLS] [", "mistral-json", "none"),
    ("[TOOL_CALLS]f[ARGS]{} [THINK] [/THINK]", "mistral", "mistral"),
    ('<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>', "gemma", "gemma"),
    ("<start_function_call>", "functiongemma", "none"),
    ("<|tool_calls_section_begin|> <think> </think>", "kimi", "think"),
    ("<minimax:tool_call> <think> </think>", "minimax", "think"),
    ("<｜tool▁calls▁begin｜> ```json", "deepseek-v3", "none"),
    ("<｜tool▁calls▁begin｜> <think> </think>", "deepseek-v3.1", "think"),
    ("<｜DSML｜function_calls>", "deepseek-v3.2", "none"),
    ("<|channel|>commentary<|message|>", "harmony", "harmony"),
    ("<|tool_call|>[", "granite", "none"),
    ("<TOOLCALL>[ <think> </think>", "nemotron", "think"),
    ("plain <|im_start|>", "none", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_formats_are_detected_from_the_template(template: str, tools: str, reasoning: str) -> None:
    assert detect_chat_format(template, lambda token: False).names == (tools, reasoning)


@pytest.mark.parametrize(
    ("tokens", "tools", "reasoning"),
    [
        ({"<tool_call>", "</tool_call>", "<think>", "</think>"}, "hermes", "think"),
        ({"<|tool_call_start|>", "<|tool_call_end|>"}, "lfm2", "none"),
        ({"[TOOL_CALLS]"}, "mistral-json", "none"),
        ({"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}, "mistral", "mistral"),
        ({"<|channel|>", "<|constrain|>"}, "harmony", "harmony"),
        (set(), "none", "none"),
    ],
)
def test_formats_are_detected_from_the_vocabulary(tokens: set[str], tools: str, reasoning: str) -> None:
    assert detect_chat_format(None, tokens.__contains__).names == (tools, reasoning)


def test_explicit_formats_take_precedence() -> None:
    template = "<tool_call> <think> </think>"
    assert detect_chat_format(template, lambda token: False, "llama", "none").names == ("llama", "none")
    assert detect_chat_format(template, lambda token: False, "none", "mistral").names == ("none", "mistral")
    with pytest.raises(ModelError, match=r"no tool format 'nope'\. Use one of: auto, none, harmony"):
        detect_chat_format(template, lambda token: False, "nope")
    with pytest.raises(ModelError, match="no reasoning format"):
        detect_chat_format(template, lambda token: False, "auto", "nope")


def test_reasoning_formats_are_distinct() -> None:
    assert len(set(REASONING.values())) == len(REASONING)
