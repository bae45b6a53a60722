"""What all of Ollama's routes share in /openapi.json: error responses and the description of a stream."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from millstream.api.error_docs import ErrorDocs
from millstream.api.ollama.errors import OllamaError
from millstream.api.openapi import reference

ERRORS = ErrorDocs(OllamaError, prefix="Ollama", codes=False)


def line_stream(line: type[BaseModel]) -> dict[str, Any]:
    """The content of a streamed response: a schema of each line, as OpenAPI 3.1 has it."""
    schema = {
        "title": f"{line.__name__}Line",
        "description": (
            "One line of JSON. The last line of a complete stream has `done` set to true, or the status `success`. "
            "A failure after the first line is a line with an `error`, and nothing follows it."
        ),
        "anyOf": [reference(line), reference(OllamaError)],
    }
    return {"application/x-ndjson": {"schema": schema}}
