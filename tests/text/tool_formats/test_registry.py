"""Which format a model gets, from what its template shows and what its vocabulary holds."""

from __future__ import annotations

import pytest

from millstream.errors import ModelError
from millstream.text.style import REASONING, choose_style

SHOWN = [
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


@pytest.mark.parametrize(("template", "tools", "reasoning"), SHOWN)
def test_a_template_shows_its_format(template: str, tools: str, reasoning: str) -> None:
    assert choose_style(template, lambda token: False).names == (tools, reasoning)


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
def test_or_the_vocabulary_tells(tokens: set[str], tools: str, reasoning: str) -> None:
    assert choose_style(None, tokens.__contains__).names == (tools, reasoning)


def test_the_user_has_the_last_word() -> None:
    template = "<tool_call> <think> </think>"
    assert choose_style(template, lambda token: False, "llama", "none").names == ("llama", "none")
    assert choose_style(template, lambda token: False, "none", "mistral").names == ("none", "mistral")
    with pytest.raises(ModelError, match=r"no tool format 'nope'\. Known are: auto, none, harmony"):
        choose_style(template, lambda token: False, "nope")
    with pytest.raises(ModelError, match="no reasoning format"):
        choose_style(template, lambda token: False, "auto", "nope")


def test_marks_have_names_of_their_own() -> None:
    assert len(set(REASONING.values())) == len(REASONING)
