"""The fields of all requests that generate, made from the one list of parameters, and how they become one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, WithJsonSchema, create_model
from pydantic import model_validator as checks_model

from millstream.api.numbers import Whole, token_ids
from millstream.errors import BadRequest
from millstream.parameters import BY_NAME, NAMES, NO_LIMIT, PARAMETERS, Parameter
from millstream.types import SAMPLING_FIELDS, Sampling

Schema = dict[str, Any]

MAX_STOPS = 64
MAX_STOP_LENGTH = 1_024
MAX_BIAS = 100
MAX_BIASES = 10_000
MAX_STOP_TOKENS = 256
TEMPERATURE = 1.0
"""Of requests that set none, for models that have no default."""
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ANOTHER_NAME = "Another name of "
"""How the descriptions of such fields begin."""


def _stops(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Empty strings are left out: they stand for "none" in the forms of many clients."""
    name = info.field_name or "stop"
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"{name} must be a string or a list of at most {MAX_STOPS} strings.", param=name)
    for index, stop in enumerate(stops):
        path = f"{name}[{index}]"
        if not isinstance(stop, str):
            raise BadRequest(f"{path} must be a string.", param=path)
        if len(stop) > MAX_STOP_LENGTH:
            raise BadRequest(f"{path} has {len(stop)} characters; at most {MAX_STOP_LENGTH} are allowed.", param=path)
    return tuple(stop for stop in stops if stop)


def _tokens(value: object, info: ValidationInfo) -> tuple[int, ...]:
    tokens = token_ids(value) if isinstance(value, list) and len(value) <= MAX_STOP_TOKENS else None
    if tokens is None:
        name = info.field_name
        raise BadRequest(f"{name} must be a list of at most {MAX_STOP_TOKENS} token ids.", param=name)
    return tokens


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    name = "logit_bias"
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object that maps token ids to numbers.", param=name)
    if len(value) > MAX_BIASES:
        raise BadRequest(f"{name} has {len(value)} tokens; at most {MAX_BIASES} are allowed.", param=name)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        path = f"{name}.{token}"
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise BadRequest(f'{name} has the key "{token[:40]}", which is not a token id.', param=name)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise BadRequest(f"{path} must be a number from {-MAX_BIAS} to {MAX_BIAS}.", param=path)
        biases[int(token)] = float(bias)
    return tuple(biases.items())


def _prediction(value: object) -> str:
    """The text that the client expects, from `{"type": "content", "content": a string or text parts}`."""
    if not isinstance(value, dict) or value.get("type") != "content":
        raise BadRequest('prediction must be an object with the type "content".', param="prediction")
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{path} must be a string or a list of text parts.", param=path)
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f'{path}[{index}] must be an object with the type "text" and a text.', param=f"{path}[{index}]"
            )
    return "".join(part["text"] for part in content)


_TEXT: Schema = {"type": "string"}
_STOP: Schema = {"type": "string", "maxLength": MAX_STOP_LENGTH}
_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_FORMS: dict[str, Any] = {
    "number": float,
    "integer": Whole,
    "flag": bool,
    "stops": Annotated[
        tuple[str, ...],
        PlainValidator(_stops),
        WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
    ],
    "tokens": Annotated[
        tuple[int, ...],
        PlainValidator(_tokens),
        WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_STOP_TOKENS}),
    ],
    "bias": Annotated[
        tuple[tuple[int, float], ...],
        PlainValidator(_bias),
        WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "maxProperties": MAX_BIASES,
                "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            }
        ),
    ],
    "prediction": Annotated[
        str,
        PlainValidator(_prediction),
        WithJsonSchema(
            {
                "type": "object",
                "required": ["type", "content"],
                "properties": {
                    "type": {"const": "content"},
                    "content": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}]},
                },
            }
        ),
    ],
}


class _Fields(BaseModel):
    """Parameters of generation. One that is null counts as not given."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    def given(self, name: str) -> Any:
        """A parameter under any of its names. None if it is not given."""
        found = (getattr(self, each) for each in BY_NAME[name].all_names)
        return next((value for value in found if value is not None), None)

    @checks_model(mode="after")
    def _names_agree(self) -> _Fields:
        for name, value in self._sent().items():
            row = BY_NAME[NAMES[name]]
            first = next(each for each in row.all_names if getattr(self, each) is not None)
            if (one := getattr(self, first)) != value:
                raise BadRequest(f"{first} ({one}) and {name} ({value}) disagree; send one of them.", param=name)
        return self

    def _sent(self) -> dict[str, Any]:
        """All parameters that are given, by the names that they have in the request."""
        names = NAMES.keys() & self.model_fields_set
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def limit(self) -> int | None:
        """The most tokens of an answer; None if it is not given."""
        value: int | None = self.given("max_tokens")
        if value == 0:
            name = next(name for name in BY_NAME["max_tokens"].names if getattr(self, name) == 0)
            raise BadRequest(f"{name} must be at least 1, or -1 for no limit, but 0 was sent.", param=name)
        return NO_LIMIT if value == -1 else value

    def generation_fields(self) -> dict[str, Any]:
        """All parameters as fields of a `GenerationRequest`."""
        asked = {NAMES[name]: value for name, value in self._sent().items()}
        if asked.pop("repeat_last_n", None) == 0:
            asked |= NO_PENALTIES
        if asked.get("seed") == -1:
            del asked["seed"]
        sampling = {name: asked.pop(name) for name in SAMPLING_FIELDS & asked.keys()}
        return asked | {
            "sampling": Sampling(**{"temperature": TEMPERATURE, **sampling}),
            "seeded": "seed" in sampling,
            "unset": SAMPLING_FIELDS - sampling.keys(),
            "max_tokens": self.limit(),
        }


def _field(row: Parameter, name: str) -> tuple[Any, Any]:
    kind = _FORMS[row.kind]
    if row.kind in ("number", "integer"):
        kind = Annotated[kind, Field(ge=row.low, le=row.high)]
    if row.name == "max_tokens":
        kind = Annotated[kind, Field(json_schema_extra={"not": {"const": 0}})]
    told = row.help if name == row.all_names[0] else f"{ANOTHER_NAME}{row.all_names[0]}."
    return kind | None, Field(None, description=told)


if TYPE_CHECKING:
    GenerationFields = _Fields
else:
    GenerationFields = create_model(
        "GenerationFields",
        __base__=_Fields,
        **{name: _field(row, name) for row in PARAMETERS for name in row.all_names},
    )
