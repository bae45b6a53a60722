"""What an answer must match, in the forms that clients send it: OpenAI's, vLLM's and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationInfo, WithJsonSchema

from millstream.errors import BadRequest, UnsupportedParameter
from millstream.text.grammar_limits import MAX_CHOICES, check_schema, check_size
from millstream.types import Grammar

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def read_response_format(value: object) -> Grammar | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f'{name} must be an object with a type: "text", "json_object" or "json_schema".', param=name)
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(value["schema"], f"{name}.schema") if value.get("schema") is not None else ANY_OBJECT
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise BadRequest(f"{name}.json_schema must be an object with a schema.", param=f"{name}.json_schema")
    # Enforced whether `strict` or not: a schema is no hint here.
    return _schema(inner["schema"], f"{name}.json_schema.schema") if inner.get("schema") is not None else ANY_OBJECT


def _schema(value: object, name: str) -> Grammar:
    """An object, or its text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"{name} is not valid JSON: {error.msg}.", param=name) from error
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be a JSON schema: an object.", param=name)
    check_schema(value, name)
    return Grammar("json_schema", _bounded(orjson.dumps(value).decode(), name))


def _regex(value: object, name: str) -> Grammar:
    return Grammar("regex", _text(value, name))


def _written(value: object, name: str) -> Grammar:
    """Lark's form, or llama.cpp's GBNF, which writes its rules with ::=."""
    source = _text(value, name)
    return Grammar("gbnf" if "::=" in source else "lark", source)


def _choice(value: object, name: str) -> Grammar:
    texts = value if isinstance(value, list) else []
    if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in texts):
        wanted = f"a list of 1 to {MAX_CHOICES} non-empty strings"
        raise BadRequest(f"{name} must be {wanted}.", param=name)
    # One terminal: the lexer takes thousands of strings in its stride, and the parser would look at each by itself.
    return Grammar("lark", _bounded("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts)), name))


def _any_object(value: object, name: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false.", param=name)
    return ANY_OBJECT if value else None


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRequest(f"{name} must be a non-empty string.", param=name)
    return _bounded(value, name)


def _bounded(source: str, name: str) -> str:
    check_size(source, name)
    return source


_Reader = Callable[[object, str], Grammar | None]

_OPTIONS: Mapping[str, _Reader] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _written,
}


def read_structured_outputs(value: object) -> Grammar | None:
    """vLLM's object: exactly one kind of constraint."""
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object with one of {', '.join(_OPTIONS)}.", param=name)
    given = {key: option for key, option in value.items() if option is not None and option is not False}
    for key in given:
        if key not in _OPTIONS:
            known = ", ".join(_OPTIONS)
            raise UnsupportedParameter(f"{name}.{key} is not served; {known} are.", param=f"{name}.{key}")
    return only({f"{name}.{key}": _OPTIONS[key](option, f"{name}.{key}") for key, option in given.items()})


def only(asked: Mapping[str, Grammar | None]) -> Grammar | None:
    """The one grammar that is asked for, if any."""
    given = {name: grammar for name, grammar in asked.items() if grammar is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise BadRequest(f"{first} and {second} cannot be combined: an answer has one form.", param=second)
    return next(iter(given.values()), None)


def _by_itself(kind: str) -> PlainValidator:
    """Reads a parameter that is a constraint of this kind."""

    def read(value: object, info: ValidationInfo) -> Grammar | None:
        return None if value == "" else _OPTIONS[kind](value, info.field_name or kind)

    return PlainValidator(read)


_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_NOT_GIVEN: dict[str, Any] = {"enum": [None, False]}
_KINDS: dict[str, Any] = {
    "json": {"anyOf": [_OBJECT, _TEXT, {"const": True}], "description": "A JSON schema, or its text."},
    "json_object": {"type": "boolean"},
    "regex": _TEXT,
    "choice": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "minItems": 1,
        "maxItems": MAX_CHOICES,
    },
    "grammar": _TEXT,
}
_STRUCTURED = {
    "type": "object",
    "properties": {kind: {"anyOf": [schema, _NOT_GIVEN]} for kind, schema in _KINDS.items()},
    "additionalProperties": _NOT_GIVEN,
}
_SCHEMA: dict[str, Any] = {"anyOf": [*_KINDS["json"]["anyOf"], {"type": "null"}]}
_NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "schema": _SCHEMA,
        "name": {"description": "Has no effect."},
        "strict": {"description": "Has no effect: a schema is always enforced."},
    },
}


def _format(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    return {
        "title": kind,
        "type": "object",
        "required": ["type", *required],
        "properties": {"type": {"const": kind}, **properties},
    }


_FORMAT = {
    "anyOf": [
        _format("text"),
        _format("json_object", schema=_SCHEMA),
        _format("json_schema", "json_schema", json_schema=_NAMED),
    ]
}
_NO_CHOICE: dict[str, Any] = {"const": ""}
ResponseFormat = Annotated[Grammar | None, PlainValidator(read_response_format), WithJsonSchema(_FORMAT)]
StructuredOutputs = Annotated[Grammar | None, PlainValidator(read_structured_outputs), WithJsonSchema(_STRUCTURED)]
Schema = Annotated[Grammar | None, _by_itself("json"), WithJsonSchema(_KINDS["json"])]
Regex = Annotated[Grammar | None, _by_itself("regex"), WithJsonSchema(_TEXT)]
Choice = Annotated[Grammar | None, _by_itself("choice"), WithJsonSchema({"anyOf": [_KINDS["choice"], _NO_CHOICE]})]
Written = Annotated[Grammar | None, _by_itself("grammar"), WithJsonSchema(_TEXT)]


class FormRequest(BaseModel):
    """The form that an answer must have, under every name that it goes by."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    response_format: ResponseFormat = None
    """What the answer must be: text, any JSON object, or JSON of a schema."""
    structured_outputs: StructuredOutputs = None
    """The same and more, as vLLM has it: one of json, json_object, regex, choice and grammar."""
    guided_json: Schema = None
    """The answer is JSON of this schema."""
    guided_regex: Regex = None
    """The answer matches this regular expression."""
    guided_choice: Choice = None
    """The answer is one of these strings."""
    guided_grammar: Written = None
    """The answer matches this grammar, written in Lark's or in llama.cpp's form."""
    json_schema: Schema = None
    """llama.cpp's name of guided_json."""
    grammar: Written = None
    """llama.cpp's name of guided_grammar."""

    def form(self) -> Grammar | None:
        """The one that is asked for, if any."""
        return only(
            {
                "response_format": self.response_format,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
                "guided_regex": self.guided_regex,
                "guided_choice": self.guided_choice,
                "guided_grammar": self.guided_grammar,
                "json_schema": self.json_schema,
                "grammar": self.grammar,
            }
        )
