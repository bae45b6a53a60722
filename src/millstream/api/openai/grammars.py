"""Structured output: parses the constraint on the output in OpenAI's, vLLM's and llama.cpp's forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationInfo, WithJsonSchema

from millstream.api.schema_grammar import ANY_OBJECT, schema_grammar
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.text.grammars.limits import MAX_CHOICES, check_size
from millstream.types import Grammar


def parse_response_format(value: object) -> Grammar | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f'{name} must be an object with a type: "text", "json_object" or "json_schema".', param=name)
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar(value["schema"], f"{name}.schema") if value.get("schema") is not None else ANY_OBJECT
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise BadRequest(f"{name}.json_schema must be an object with a schema.", param=f"{name}.json_schema")
    # Enforced with or without `strict`: a schema is more than a hint here.
    schema = inner.get("schema")
    return ANY_OBJECT if schema is None else schema_grammar(schema, f"{name}.json_schema.schema")


def _regex(value: object, name: str) -> Grammar:
    return Grammar("regex", _text(value, name))


def _grammar(value: object, name: str) -> Grammar:
    """Lark syntax, or llama.cpp's GBNF, which writes rules with ::=."""
    source = _text(value, name)
    return Grammar("gbnf" if "::=" in source else "lark", source)


def _choice(value: object, name: str) -> Grammar:
    texts = value if isinstance(value, list) else []
    if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"{name} must be a list of 1 to {MAX_CHOICES} non-empty strings.", param=name)
    # One terminal: the lexer handles thousands of strings with ease, while the parser would try them one by one.
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


_Parser = Callable[[object, str], Grammar | None]

_OPTIONS: Mapping[str, _Parser] = {
    "json": schema_grammar,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def parse_structured_outputs(value: object) -> Grammar | None:
    """vLLM's object, with exactly one kind of constraint."""
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object with one of {', '.join(_OPTIONS)}.", param=name)
    given = {key: option for key, option in value.items() if option is not None and option is not False}
    for key in given:
        if key not in _OPTIONS:
            known = ", ".join(_OPTIONS)
            raise UnsupportedParameter(f"{name}.{key} is not supported. Supported are {known}.", param=f"{name}.{key}")
    return only({f"{name}.{key}": _OPTIONS[key](option, f"{name}.{key}") for key, option in given.items()})


def only(requested: Mapping[str, Grammar | None]) -> Grammar | None:
    """Returns the requested grammar, if any. Raises `BadRequest` if there are several."""
    given = {name: grammar for name, grammar in requested.items() if grammar is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise BadRequest(f"{first} and {second} cannot be combined. Send one of them.", param=second)
    return next(iter(given.values()), None)


def _parameter(kind: str) -> PlainValidator:
    """Parses a parameter that is a constraint of this kind."""

    def parse(value: object, info: ValidationInfo) -> Grammar | None:
        return None if value == "" else _OPTIONS[kind](value, info.field_name or kind)

    return PlainValidator(parse)


_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_NOT_GIVEN: dict[str, Any] = {"enum": [None, False]}
_KINDS: dict[str, Any] = {
    "json": {"anyOf": [_OBJECT, _TEXT, {"const": True}], "description": "A JSON schema, as an object or as text."},
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
ResponseFormat = Annotated[Grammar | None, PlainValidator(parse_response_format), WithJsonSchema(_FORMAT)]
StructuredOutputs = Annotated[Grammar | None, PlainValidator(parse_structured_outputs), WithJsonSchema(_STRUCTURED)]
Schema = Annotated[Grammar | None, _parameter("json"), WithJsonSchema(_KINDS["json"])]
Regex = Annotated[Grammar | None, _parameter("regex"), WithJsonSchema(_TEXT)]
Choice = Annotated[Grammar | None, _parameter("choice"), WithJsonSchema({"anyOf": [_KINDS["choice"], _NO_CHOICE]})]
GrammarText = Annotated[Grammar | None, _parameter("grammar"), WithJsonSchema(_TEXT)]


class StructuredRequest(BaseModel):
    """The constraint on the output, under every parameter name in use."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    response_format: ResponseFormat = None
    """Structured output: text, any JSON object, or JSON that matches a schema."""
    structured_outputs: StructuredOutputs = None
    """Structured output in vLLM's form: one of json, json_object, regex, choice and grammar."""
    guided_json: Schema = None
    """The output is JSON that matches this schema."""
    guided_regex: Regex = None
    """The output matches this regular expression."""
    regex: Regex = None
    """SGLang's name for guided_regex."""
    guided_choice: Choice = None
    """The output is one of these strings."""
    guided_grammar: GrammarText = None
    """The output matches this grammar, in Lark syntax or llama.cpp's GBNF."""
    json_schema: Schema = None
    """llama.cpp's name for guided_json."""
    grammar: GrammarText = None
    """llama.cpp's name for guided_grammar."""

    def output_grammar(self) -> Grammar | None:
        """Returns the requested constraint, if any."""
        return only(
            {
                "response_format": self.response_format,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
                "guided_regex": self.guided_regex,
                "regex": self.regex,
                "guided_choice": self.guided_choice,
                "guided_grammar": self.guided_grammar,
                "json_schema": self.json_schema,
                "grammar": self.grammar,
            }
        )
