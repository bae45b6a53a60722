"""Corpus of formats whose arguments are not JSON: tags, Python, Gemma's quotes."""

# ruff: noqa: E501

from __future__ import annotations

from tool_examples import broken, good, weather


def _coder(name: str, *pairs: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


QWEN3_CODER = [
    good(_coder("get_weather", ("city", "Oslo")), weather("Oslo")),
    good(_coder("get_weather", ("city", "São Paulo"), ("days", "3"), ("unit", "celsius")), weather("São Paulo", days=3, unit="celsius")),
    good(_coder("now"), ("now", {})),
    good(_coder("search", ("query", "12"), ("limit", "null"), ("tags", '["a", "b"]')), ("search", {"query": "12", "limit": None, "tags": ["a", "b"]})),
    good(_coder("search", ("query", "true"), ("limit", "5")), ("search", {"query": "true", "limit": 5})),
    good(_coder("set_light", ("on", "True"), ("level", "0.25"), ("zone", '{"a": 1}')), ("set_light", {"on": True, "level": 0.25, "zone": {"a": 1}})),
    good(_coder("set_light", ("on", "false"), ("zone", "null")), ("set_light", {"on": False, "zone": None})),
    good(_coder("set_light", ("level", "bright")), ("set_light", {"level": "bright"})),
    good(_coder("write_file", ("path", "a.py"), ("text", "def f(x):\n    if x < 3:\n        return {'a': 1}\n")), ("write_file", {"path": "a.py", "text": "def f(x):\n    if x < 3:\n        return {'a': 1}\n"})),
    good(_coder("write_file", ("path", "a.html"), ("text", "<p>one</p>\n\n<b>two</b>")), ("write_file", {"path": "a.html", "text": "<p>one</p>\n\n<b>two</b>"})),
    good(_coder("other", ("a", "5"), ("b", '{"c": 1}'), ("d", "text")), ("other", {"a": 5, "b": {"c": 1}, "d": "text"})),
    good("<think>\nWeather.\n</think>\n\nI look.\n\n" + _coder("get_weather", ("city", "Oslo")), weather("Oslo"), content="I look.", reasoning="Weather."),
    good(_coder("get_weather", ("city", "Oslo")) + "\n" + _coder("get_weather", ("city", "Rome")), weather("Oslo"), weather("Rome")),
    good("<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>", weather("Oslo")),
    good("<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", weather("Oslo", days=2)),
    good("<tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</tool_call>", weather("Oslo")),
    good('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', weather("Oslo")),
    good("<tool_call><function=get_weather><parameter=city>Oslo</parameter></function><function=now></function></tool_call>", weather("Oslo"), ("now", {})),
    broken("<tool_call>\n<function=get_weather>\n<parameter=city>\nOs"),
    broken("<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"),
    broken("<tool_call>\nget the weather\n</tool_call>"),
    broken("<tool_call>\n<function=get_weather>\nOslo\n</function>\n</tool_call>"),
    broken("<tool_call>\n</tool_call>"),
    broken("A <function of x> is not one."),
]  # fmt: skip


def _glm(name: str, *pairs: tuple[str, str], gap: str = "") -> str:
    inner = gap.join(f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>{name}{gap}{inner}{gap}</tool_call>"


GLM = [
    good(_glm("get_weather", ("city", "Oslo")), weather("Oslo")),
    good(_glm("get_weather", ("city", "Oslo"), ("days", "3"), gap="\n"), weather("Oslo", days=3)),
    good(_glm("get_weather", ("city", "東京"), ("unit", "celsius")), weather("東京", unit="celsius")),
    good(_glm("now"), ("now", {})),
    good(_glm("now", gap="\n"), ("now", {})),
    good(_glm("search", ("query", "42"), ("limit", "null"), ("tags", '["x", "y"]')), ("search", {"query": "42", "limit": None, "tags": ["x", "y"]})),
    good(_glm("set_light", ("on", "true"), ("level", "7"), ("room", "hall")), ("set_light", {"on": True, "level": 7, "room": "hall"})),
    good(_glm("write_file", ("path", "a.sh"), ("text", "#!/bin/sh\necho '<b>' > out\n")), ("write_file", {"path": "a.sh", "text": "#!/bin/sh\necho '<b>' > out\n"})),
    good(_glm("other", ("n", "1.5"), ("s", "abc"), ("o", '{"a": [1]}')), ("other", {"n": 1.5, "s": "abc", "o": {"a": [1]}})),
    good("Weather.</think>I look." + _glm("get_weather", ("city", "Oslo")), weather("Oslo"), content="I look.", reasoning="Weather.", in_reasoning=True),
    good("<think>Weather.</think>\n" + _glm("get_weather", ("city", "Oslo")), weather("Oslo"), reasoning="Weather."),
    good(_glm("get_weather", ("city", "Oslo")) + "\n" + _glm("get_weather", ("city", "Rome")), weather("Oslo"), weather("Rome")),
    good('<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>', weather("Oslo")),
    good(_glm("get_weather", ("city", "Oslo")).removesuffix("</tool_call>"), weather("Oslo")),
    broken("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Os"),
    broken("<tool_call>get_weather<arg_key>city</arg_key></tool_call>"),
    broken("<tool_call>what is the weather</tool_call>"),
    broken("<tool_call></tool_call>"),
    broken("Fine weather."),
]  # fmt: skip


def _invoke(name: str, *pairs: tuple[str, str], tag: str = "") -> str:
    inner = "".join(f'<{tag}parameter name="{key}">{value}</{tag}parameter>\n' for key, value in pairs)
    return f'<{tag}invoke name="{name}">\n{inner}</{tag}invoke>\n'


def _minimax(*invokes: str) -> str:
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


MINIMAX = [
    good(_minimax(_invoke("get_weather", ("city", "Oslo"))), weather("Oslo")),
    good(_minimax(_invoke("get_weather", ("city", "Oslo"), ("days", "3"))), weather("Oslo", days=3)),
    good(_minimax(_invoke("now")), ("now", {})),
    good(_minimax(_invoke("get_weather", ("city", "Oslo")), _invoke("get_weather", ("city", "Rome"))), weather("Oslo"), weather("Rome")),
    good(_minimax(_invoke("search", ("query", "7"), ("limit", "none"), ("tags", '["a"]'))), ("search", {"query": "7", "limit": None, "tags": ["a"]})),
    good(_minimax(_invoke("set_light", ("on", "false"), ("level", "-1.5"), ("zone", "{}"))), ("set_light", {"on": False, "level": -1.5, "zone": {}})),
    good(_minimax(_invoke("write_file", ("path", "x"), ("text", "a > b\n\"c\" & 'd'"))), ("write_file", {"path": "x", "text": "a > b\n\"c\" & 'd'"})),
    good(_minimax(_invoke("write_file", ("path", "x.html"), ("text", "<i>1</i>"))), ("write_file", {"path": "x.html", "text": "<i>1</i>"})),
    good(_minimax(_invoke("other", ("n", "3"))), ("other", {"n": 3})),
    good("Weather.\n</think>\n\nI look.\n" + _minimax(_invoke("get_weather", ("city", "Oslo"))), weather("Oslo"), content="I look.", reasoning="Weather.", in_reasoning=True),
    good("<think>\nWeather.\n</think>\n" + _minimax(_invoke("get_weather", ("city", "Oslo"))), weather("Oslo"), reasoning="Weather."),
    good("<minimax:tool_call><invoke name='get_weather'><parameter name='city'>Oslo</parameter></invoke></minimax:tool_call>", weather("Oslo")),
    good(_minimax(_invoke("get_weather", ("city", "Oslo"))).removesuffix("</minimax:tool_call>"), weather("Oslo")),
    broken(_minimax()),
    broken('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Os'),
    broken('<minimax:tool_call>\n<invoke name="get_weather">Oslo</invoke>\n</minimax:tool_call>'),
    broken("<minimax:tool_call>weather, please</minimax:tool_call>"),
    broken("<minimax:tool"),
]  # fmt: skip

_D = "｜DSML｜"


def _dsml(*invokes: str) -> str:
    return f"<{_D}function_calls>\n{''.join(invokes)}</{_D}function_calls>"


DEEPSEEK_V32 = [
    good(_dsml(_invoke("get_weather", ("city", "Oslo"), tag=_D)), weather("Oslo")),
    good(_dsml(_invoke("get_weather", ("city", "Oslo"), ("days", "3"), tag=_D)), weather("Oslo", days=3)),
    good(_dsml(_invoke("now", tag=_D)), ("now", {})),
    good(_dsml(_invoke("get_weather", ("city", "Oslo"), tag=_D), _invoke("get_weather", ("city", "Rome"), tag=_D)), weather("Oslo"), weather("Rome")),
    good(_dsml(f'<{_D}invoke name="get_weather">\n<{_D}parameter name="city" string="true">Oslo</{_D}parameter>\n<{_D}parameter name="days" string="false">3</{_D}parameter>\n</{_D}invoke>\n'), weather("Oslo", days=3)),
    good(_dsml(f'<{_D}invoke name="other">\n<{_D}parameter name="a" string="true">5</{_D}parameter>\n<{_D}parameter name="b" string="false">[1, 2]</{_D}parameter>\n</{_D}invoke>\n'), ("other", {"a": "5", "b": [1, 2]})),
    good(_dsml(_invoke("search", ("query", "q"), ("tags", '["a", "b"]'), tag=_D)), ("search", {"query": "q", "tags": ["a", "b"]})),
    good(_dsml(_invoke("set_light", ("on", "true"), ("level", "1"), tag=_D)), ("set_light", {"on": True, "level": 1})),
    good(_dsml(_invoke("write_file", ("path", "a"), ("text", "x\n<y>\n"), tag=_D)), ("write_file", {"path": "a", "text": "x\n<y>\n"})),
    good("Weather.</think>\n\n" + _dsml(_invoke("get_weather", ("city", "Oslo"), tag=_D)), weather("Oslo"), reasoning="Weather.", in_reasoning=True),
    good("I look.\n\n" + _dsml(_invoke("get_weather", ("city", "Oslo"), tag=_D)), weather("Oslo"), content="I look."),
    good(_dsml(_invoke("get_weather", ("city", "Oslo"), tag=_D)).removesuffix(f"</{_D}function_calls>"), weather("Oslo")),
    broken(_dsml()),
    broken(f'<{_D}function_calls>\n<{_D}invoke name="get_weather">\n<{_D}parameter name="city">Os'),
    broken(f"<{_D}function_calls>weather</{_D}function_calls>"),
    broken("Fine weather."),
]  # fmt: skip

_Q = '<|"|>'


def _gemma(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>"


GEMMA = [
    good(_gemma(f"get_weather{{city:{_Q}Oslo{_Q}}}"), weather("Oslo")),
    good(_gemma("get_weather{city:'Tokyo'}"), weather("Tokyo")),
    good(_gemma('get_weather{city:"Tokyo"}'), weather("Tokyo")),
    good(_gemma("get_weather{city:Tokyo,days:3}"), weather("Tokyo", days=3)),
    good(_gemma(f"get_weather{{city:{_Q}Oslo{_Q},days:3,unit:{_Q}celsius{_Q}}}"), weather("Oslo", days=3, unit="celsius")),
    good(_gemma("now{}"), ("now", {})),
    good(_gemma(f"search{{query:{_Q}a, b: {{c}} 'd' \"e\"{_Q},tags:[{_Q}x{_Q},{_Q}y{_Q}]}}"), ("search", {"query": "a, b: {c} 'd' \"e\"", "tags": ["x", "y"]})),
    good(_gemma(f"set_light{{level:-0.5,on:true,room:{_Q}hall{_Q},zone:{{a:[1,2],b:{{c:null}}}}}}"), ("set_light", {"level": -0.5, "on": True, "room": "hall", "zone": {"a": [1, 2], "b": {"c": None}}})),
    good(_gemma("get_weather{city:'L'Aquila'}"), weather("L'Aquila")),
    good(_gemma(f"get_weather{{city:{_Q}Oslo{_Q}}}") + _gemma(f"get_weather{{city:{_Q}Rome{_Q}}}"), weather("Oslo"), weather("Rome")),
    good(f"<|tool_call>call:get_weather{{city:{_Q}Oslo{_Q}}}call:now{{}}<tool_call|>", weather("Oslo"), ("now", {})),
    good("<|channel>thought\nWeather.\n<channel|>I look." + _gemma(f"get_weather{{city:{_Q}Oslo{_Q}}}"), weather("Oslo"), content="I look.", reasoning="Weather."),
    good("<|channel>thought\n<channel|>It is fine.", content="It is fine."),
    good(_gemma(f"search{{query:{_Q}line one\nline two{_Q},limit:null}}"), ("search", {"query": "line one\nline two", "limit": None})),
    good(_gemma("search{query:42}"), ("search", {"query": "42"})),
    good(_gemma("set_light{'on': 'true', \"level\": '5'}"), ("set_light", {"on": True, "level": 5})),
    good(f"<|tool_call>call:get_weather{{city:{_Q}Oslo{_Q}}}", weather("Oslo")),
    good('<|tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}<tool_call|>', weather("Oslo")),
    broken(f"<|tool_call>call:get_weather{{city:{_Q}Os"),
    broken("<|tool_call>call:get_weather{city:'Oslo'<tool_call|>"),
    broken("<|tool_call>call:<tool_call|>"),
    broken("<|tool_call><tool_call|>"),
    broken("<|tool_call>the weather<tool_call|>"),
    broken("Fine <| weather."),
]  # fmt: skip


def _function(body: str) -> str:
    return f"<start_function_call>call:{body}<end_function_call>"


_E = "<escape>"

FUNCTION_GEMMA = [
    good(_function(f"get_weather{{city:{_E}Oslo{_E}}}"), weather("Oslo")),
    good(_function(f"get_weather{{city:{_E}Oslo{_E},days:2}}"), weather("Oslo", days=2)),
    good(_function("now{}"), ("now", {})),
    good(_function("get_weather{city:'Oslo'}"), weather("Oslo")),
    good(_function("get_weather{city:Oslo}"), weather("Oslo")),
    good(_function(f"search{{query:{_E}a, {{b}}: c{_E},tags:[{_E}x{_E}]}}"), ("search", {"query": "a, {b}: c", "tags": ["x"]})),
    good(_function(f"set_light{{on:true,level:0.5,room:{_E}hall{_E}}}"), ("set_light", {"on": True, "level": 0.5, "room": "hall"})),
    good(_function("set_light{zone:{a:1}}"), ("set_light", {"zone": {"a": 1}})),
    good(_function(f"write_file{{path:{_E}a{_E},text:{_E}one\ntwo{_E}}}"), ("write_file", {"path": "a", "text": "one\ntwo"})),
    good(_function(f"get_weather{{city:{_E}Oslo{_E}}}") + _function(f"get_weather{{city:{_E}Rome{_E}}}"), weather("Oslo"), weather("Rome")),
    good("I look." + _function(f"get_weather{{city:{_E}Oslo{_E}}}"), weather("Oslo"), content="I look."),
    good(f"<start_function_call>call:get_weather{{city:{_E}Oslo{_E}}}", weather("Oslo")),
    good(_function(f"get_weather{{city:{_E}Zürich{_E}}}"), weather("Zürich")),
    broken(f"<start_function_call>call:get_weather{{city:{_E}Os"),
    broken("<start_function_call>weather<end_function_call>"),
    broken("<start_function_call><end_function_call>"),
    broken("Fine weather."),
]  # fmt: skip

PYTHONIC = [
    good('[get_weather(city="Oslo")]', weather("Oslo")),
    good("[get_weather(city='Oslo', days=3)]", weather("Oslo", days=3)),
    good('[get_weather(city="Oslo"), get_weather(city="Rome")]', weather("Oslo"), weather("Rome")),
    good("[now()]", ("now", {})),
    good('<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>', weather("Oslo")),
    good('<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>I look.', weather("Oslo"), content="I look."),
    good("<think>Weather.</think><|tool_call_start|>[now()]<|tool_call_end|>", ("now", {}), reasoning="Weather."),
    good('<|python_start|>[get_weather(city="Oslo")]<|python_end|>', weather("Oslo")),
    good("[set_light(on=True, level=-1.5, zone=None)]", ("set_light", {"on": True, "level": -1.5, "zone": None})),
    good('[set_light(on=false, zone={"a": [1, true, null]})]', ("set_light", {"on": False, "zone": {"a": [1, True, None]}})),
    good('[search(query="a \\"b\\", (c) [d]", tags=["x", "y"])]', ("search", {"query": 'a "b", (c) [d]', "tags": ["x", "y"]})),
    good('[write_file(path="a", text="one\\ntwo")]', ("write_file", {"path": "a", "text": "one\ntwo"})),
    good('\n[get_weather(city="Oslo")]\n', weather("Oslo")),
    good('<|tool_call_start|>get_weather(city="Oslo")<|tool_call_end|>', weather("Oslo")),
    good('<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]<|tool_call_end|>', weather("Oslo")),
    good("<|tool_call_start|>[api.v2.fetch(x=1)]<|tool_call_end|>", ("api.v2.fetch", {"x": 1})),
    broken("[1, 2, 3]"),
    broken("[unknown_function(a=1)]"),
    broken('[get_weather(city="Os'),
    broken('[get_weather("Oslo")]'),
    broken("[get_weather(city=__import__('os'))]"),
    broken("[get_weather(**{'city': 'Oslo'})]"),
    broken("<|tool_call_start|>the weather<|tool_call_end|>"),
    broken("<|tool_call_start|>[]<|tool_call_end|>"),
    broken("[see the list below]"),
]  # fmt: skip
