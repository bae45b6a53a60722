"""Corpus of formats whose arguments are JSON: the same arguments in each syntax, and the mistakes of each format."""

# ruff: noqa: E501

from __future__ import annotations

from tool_examples import JSON_ARGUMENTS, Example, broken, good, weather

OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'


def _wrapped(before: str, after: str) -> list[Example]:
    return [good(before.replace("NAME", name) + text + after, (name, value)) for name, text, value in JSON_ARGUMENTS]


HERMES = [
    *_wrapped('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    good(
        f'<think>\nThey want two cities.\n</think>\n\nI will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>',
        weather("Oslo"),
        weather("Rome"),
        content="I will look.",
        reasoning="They want two cities.",
    ),
    good(f'Hm.</think><tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</tool_call>', weather("Oslo"), reasoning="Hm.", in_reasoning=True),
    good(f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}', weather("Oslo")),
    good(f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}\n</tool_call>', weather("Oslo")),
    good(f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>', weather("Oslo"), weather("Rome")),
    good(f'<tool_call>{{"arguments": {OSLO}, "name": "get_weather"}}</tool_call>', weather("Oslo")),
    good("<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}</tool_call>", weather("Oslo")),
    good("<tool_call>{\"name\": \"get_weather\", \"arguments\": {'city': 'Oslo', 'days': 2,}}</tool_call>", weather("Oslo", days=2)),
    good('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', weather("Oslo")),
    good('<tool_call>{"name": "now", "arguments": null}</tool_call>', ("now", {})),
    good(f'<tool_call>[{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>', weather("Oslo"), ("now", {})),
    good(f'<tool_call>nonsense<tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</tool_call>', weather("Oslo"), content="<tool_call>nonsense"),
    good(f'<tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</tool_call>\nThat is all.', weather("Oslo"), content="That is all."),
    broken('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'),
    broken('<tool_call>\n{"name": "get_wea'),
    broken("<tool_call>"),
    broken("<tool_call></tool_call>"),
    broken("I would write <tool_call>your call here</tool_call> if I had to."),
    broken('<tool_call>{"arguments": {}}</tool_call>'),
    broken('<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    broken('<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    broken('<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo" "days": 2}}</tool_call>'),
    broken('<tool_call>{"name": "set_light", "arguments": {"level": NaN}}</tool_call>'),
    broken('<tool_call>{"name": "get_weather", "arguments": {"city": Oslo}}</tool_call>'),
    broken("No call at all: a < b, <tool, <tool_cal"),
    broken("  Blanks around are content.\n"),
]  # fmt: skip

_LIST = '{"name": "NAME", "arguments": '

NEMOTRON = [
    *_wrapped(f"<TOOLCALL>[{_LIST}", "}]</TOOLCALL>"),
    good(f'<TOOLCALL>[{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "get_weather", "arguments": {ROME}}}]</TOOLCALL>', weather("Oslo"), weather("Rome")),
    good(f'<think>\nWeather.\n</think>\n\n<TOOLCALL>[{{"name": "get_weather", "arguments": {OSLO}}}]</TOOLCALL>\n', weather("Oslo"), reasoning="Weather."),
    good(f'Weather.\n</think>\n\nOne moment. <TOOLCALL>[{{"name": "get_weather", "arguments": {OSLO}}}]</TOOLCALL>', weather("Oslo"), reasoning="Weather.", content="One moment.", in_reasoning=True),
    good(f'<TOOLCALL>{{"name": "get_weather", "arguments": {OSLO}}}</TOOLCALL>', weather("Oslo")),
    good(f'<TOOLCALL>[{{"name": "get_weather", "arguments": {OSLO}}}]', weather("Oslo")),
    good("<TOOLCALL>[{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}]</TOOLCALL>", weather("Oslo")),
    good('<TOOLCALL>[{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}]</TOOLCALL>', weather("Oslo")),
    broken("<TOOLCALL>[]</TOOLCALL>"),
    broken('<TOOLCALL>[{"name": "get_weather", "arguments": {"city'),
    broken("<TOOLCALL>[get the weather]</TOOLCALL>"),
    broken("<TOOLCALL"),
    broken("The weather is fine."),
]  # fmt: skip

GRANITE = [
    *_wrapped(f"<|tool_call|>[{_LIST}", "}]"),
    good(f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "get_weather", "arguments": {ROME}}}]', weather("Oslo"), weather("Rome")),
    good(f'<think>Weather.</think>\n<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}]', weather("Oslo"), reasoning="Weather."),
    good(f'<|tool_call|> {{"name": "get_weather", "arguments": {OSLO}}}', weather("Oslo")),
    good("<|tool_call|>[{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}]", weather("Oslo")),
    good(f'Let me see.<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO}}}]\n', weather("Oslo"), content="Let me see."),
    good('<|tool_call|>[{"name": "now"}]', ("now", {})),
    broken("<|tool_call|>[]"),
    broken('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"'),
    broken("<|tool_call|> I do not know."),
    broken("<|tool_call"),
    broken("The weather is fine."),
]  # fmt: skip

MISTRAL = [
    *_wrapped("[TOOL_CALLS]NAME[ARGS]", ""),
    good(f"[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]get_weather[ARGS]{ROME}", weather("Oslo"), weather("Rome")),
    good(f"[TOOL_CALLS]get_weather[ARGS]{OSLO}get_weather[ARGS]{ROME}", weather("Oslo"), weather("Rome")),
    good(f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{OSLO}", weather("Oslo")),
    good(f"One moment.[TOOL_CALLS] get_weather [ARGS] {OSLO}", weather("Oslo"), content="One moment."),
    good(f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}, "id": "a1b2c3d4e"}}]', weather("Oslo")),
    good(f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "get_weather", "arguments": {ROME}}}]', weather("Oslo"), weather("Rome")),
    good("[TOOL_CALLS]get_weather[ARGS]{'city': 'Oslo'}", weather("Oslo")),
    good("[TOOL_CALLS] [{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}]", weather("Oslo")),
    good(f"[TOOL_CALLS]get_weather[ARGS]{OSLO} Done.", weather("Oslo"), content="Done."),
    broken('[TOOL_CALLS]get_weather[ARGS]{"city": "Os'),
    broken("[TOOL_CALLS]get_weather[ARGS]"),
    broken("[TOOL_CALLS]get_weather"),
    broken("[TOOL_CALLS] []"),
    broken("[TOOL_CALLS] [1, 2]"),
    broken("[TOOL_CALLS]"),
    broken("An [ARGS] alone is nothing, nor is [TOOL_CALL]."),
]  # fmt: skip

MISTRAL_JSON = [
    *_wrapped(f"[TOOL_CALLS] [{_LIST}", "}]"),
    *_wrapped(f"[TOOL_CALLS][{_LIST}", ', "id": "a1b2c3d4e"}]'),
    broken('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Os'),
    broken("[TOOL_CALLS] [{}]"),
    broken("[TOOL_CALLS] nothing"),
]

KIMI_CALL = "<|tool_call_begin|>functions.get_weather:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

KIMI = [
    *_wrapped(f"{KIMI_BEGIN}<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", f"<|tool_call_end|>{KIMI_END}"),
    good(KIMI_BEGIN + KIMI_CALL % (0, OSLO) + KIMI_CALL % (1, ROME) + KIMI_END, weather("Oslo"), weather("Rome")),
    good("<think>Weather.</think>I look." + KIMI_BEGIN + KIMI_CALL % (0, OSLO) + KIMI_END, weather("Oslo"), content="I look.", reasoning="Weather."),
    good(KIMI_CALL % (0, OSLO), weather("Oslo")),
    good(KIMI_BEGIN + KIMI_CALL % (0, OSLO), weather("Oslo")),
    good(f"{KIMI_BEGIN}\n <|tool_call_begin|> get_weather:0 <|tool_call_argument_begin|> {OSLO} <|tool_call_end|>\n{KIMI_END}", weather("Oslo")),
    good(f"{KIMI_BEGIN}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{{'city': 'Oslo'}}<|tool_call_end|>{KIMI_END}", weather("Oslo")),
    good(f"{KIMI_BEGIN}<|tool_call_begin|>functions.my.tool-2:17<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI_END}", ("my.tool-2", {})),
    broken(f"{KIMI_BEGIN}{KIMI_END}"),
    broken(f"{KIMI_BEGIN}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{{\"city\": \"Os"),
    broken(f"{KIMI_BEGIN}<|tool_call_begin|>functions.get_weather:0<|tool_call_end|>{KIMI_END}"),
    broken(f"{KIMI_BEGIN}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>Oslo<|tool_call_end|>{KIMI_END}"),
    broken(KIMI_BEGIN),
    broken("Fine weather."),
]  # fmt: skip

DEEP_BEGIN, DEEP_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
V3_END = "\n```<｜tool▁call▁end｜>"
V31, V31_END = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_V3_OSLO = V3.replace("NAME", "get_weather") + OSLO + V3_END
_V31_OSLO = V31.replace("NAME", "get_weather") + OSLO + V31_END

DEEPSEEK_V3 = [
    *_wrapped(DEEP_BEGIN + V3, V3_END + DEEP_END),
    good(DEEP_BEGIN + _V3_OSLO + "\n" + _V3_OSLO.replace("Oslo", "Rome") + DEEP_END, weather("Oslo"), weather("Rome")),
    good("<think>\nWeather.\n</think>\n\n" + DEEP_BEGIN + _V3_OSLO + DEEP_END, weather("Oslo"), reasoning="Weather."),
    good(DEEP_BEGIN + _V3_OSLO, weather("Oslo")),
    good(DEEP_BEGIN + V3.replace("NAME", "get_weather") + "{'city': 'Oslo'}" + V3_END + DEEP_END, weather("Oslo")),
    broken(DEEP_BEGIN + V3.replace("NAME", "get_weather") + '{"city": '),
    broken(DEEP_BEGIN + DEEP_END),
    broken(DEEP_BEGIN + "<｜tool▁call▁begin｜>function<｜tool▁call▁end｜>" + DEEP_END),
    broken("Fine ｜ weather."),
]

DEEPSEEK_V31 = [
    *_wrapped(DEEP_BEGIN + V31, V31_END + DEEP_END),
    good(DEEP_BEGIN + _V31_OSLO + _V31_OSLO.replace("Oslo", "Rome") + DEEP_END, weather("Oslo"), weather("Rome")),
    good("Weather.</think>One moment." + DEEP_BEGIN + _V31_OSLO + DEEP_END, weather("Oslo"), reasoning="Weather.", content="One moment.", in_reasoning=True),
    good(DEEP_BEGIN + _V31_OSLO, weather("Oslo")),
    good(DEEP_BEGIN + V31.replace("NAME", "get_weather") + "{city: 'Oslo'}" + V31_END + DEEP_END, weather("Oslo")),
    broken(DEEP_BEGIN + V31.replace("NAME", "get_weather") + '{"city": '),
    broken(DEEP_BEGIN + V31.replace("NAME", "get_weather") + "Oslo" + V31_END + DEEP_END),
    broken(DEEP_BEGIN),
    broken("Fine ｜ weather."),
]  # fmt: skip

_COMMENTARY = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
_REASONING = "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant"

HARMONY = [
    *_wrapped(_COMMENTARY, "<|call|>"),
    good(_REASONING + _COMMENTARY.replace("NAME", "get_weather") + OSLO + "<|call|>", weather("Oslo"), reasoning="Weather."),
    good(_REASONING + _COMMENTARY.replace("NAME", "get_weather") + OSLO, weather("Oslo"), reasoning="Weather."),
    good(f"{_REASONING} to=functions.get_weather<|channel|>commentary json<|message|>{OSLO}<|call|>", weather("Oslo"), reasoning="Weather."),
    good(f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{OSLO}<|call|>", weather("Oslo")),
    good(f"{_REASONING}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{OSLO}<|call|>", weather("Oslo"), content="I look.", reasoning="Weather."),
    good(f"<|channel|>commentary to=functions.get_weather json<|message|>{OSLO}<|call|><|start|>assistant<|channel|>commentary to=functions.get_weather json<|message|>{ROME}<|call|>", weather("Oslo"), weather("Rome")),
    good("<|channel|>commentary to=functions.now<|message|><|call|>", ("now", {})),
    good("<|channel|>commentary to=functions.get_weather<|message|>{'city': 'Oslo'}<|call|>", weather("Oslo")),
    good(f"{_REASONING}<|channel|>final<|message|>It is fine.<|return|>", content="It is fine.", reasoning="Weather."),
    good("<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Three.", content="Three.", reasoning="One.Two."),
    good('<|channel|>final <|constrain|>json<|message|>{"a": 1}', content='{"a": 1}'),
    good("<|channel|>analysis<|message|>cut short", reasoning="cut short"),
    broken('<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Os'),
    broken("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>Oslo<|call|>"),
    broken("<|channel|>commentary to=functions.get_wea"),
    broken("<|channel|>odd<|message|>text"),
    broken("Plain text."),
]  # fmt: skip

LLAMA = [
    *_wrapped('{"name": "NAME", "parameters": ', "}"),
    good(f'<|python_tag|>{{"name": "get_weather", "parameters": {OSLO}}}', weather("Oslo")),
    good(f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {OSLO}}}', weather("Oslo")),
    good(f'{{"name": "get_weather", "parameters": {OSLO}}}; {{"name": "get_weather", "parameters": {ROME}}}', weather("Oslo"), weather("Rome")),
    good(f'{{"name": "get_weather", "parameters": {OSLO}}}\n{{"name": "get_weather", "parameters": {ROME}}}', weather("Oslo"), weather("Rome")),
    good(f'\n\n{{"name": "get_weather", "parameters": {OSLO}}}', weather("Oslo")),
    good(f'{{"type": "function", "function": "get_weather", "parameters": {OSLO}}}', weather("Oslo")),
    good(f'{{"name": "get_weather", "arguments": {OSLO}', weather("Oslo")),
    good('<|python_tag|>get_weather.call(city="Oslo", days=2)', weather("Oslo", days=2)),
    good("{\"name\": \"get_weather\", \"parameters\": {'city': 'Oslo'}}", weather("Oslo")),
    broken('{"name": "Oslo", "population": 700000}'),
    broken('{"name": "get_weather", "parameters": {"city": "Os'),
    broken('{"name": "get_wea'),
    broken('{"answer": [1, 2, 3]}'),
    broken('{"name": "unknown_function", "parameters": {}}'),
    broken("<|python_tag|>print(1)"),
    broken('Write {"name": "get_weather", "parameters": {}} to call it.'),
    broken("{" + "x" * 300 + "}"),
    broken("Plain text."),
]  # fmt: skip
