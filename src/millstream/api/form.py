"""Forms with a file (multipart/form-data), parsed as they arrive: the file is held once, in memory, and nothing is
written to a disk. `BodyLimit` bounds the whole."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from millstream.errors import BadRequest

FORM_TYPE = "multipart/form-data"
MAX_PARTS = 100
MAX_FIELD_BYTES = 256 * 1024
"""Of a part that is not the file."""


@dataclass(slots=True)
class Form:
    fields: dict[str, str | list[str]] = field(default_factory=dict)
    """Texts by name. A name that ends in `[]` is listed without it, with a list of all its values."""
    file: bytes | None = None
    """The content of the file, whatever its name and type are said to be."""


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith(FORM_TYPE)


async def read_form(request: Request, file_name: str) -> Form:
    """`file_name`: the one field that may be large. Raises `BadRequest` if the form is damaged."""
    _, options = parse_options_header(request.headers.get("content-type", ""))
    if not (boundary := options.get(b"boundary")):
        raise BadRequest(
            "The header content-type names no boundary. Let the HTTP library write it, or send it as "
            "multipart/form-data; boundary=..."
        )
    reader = _FormReader(file_name)
    try:
        parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
        async for chunk in request.stream():
            parser.write(chunk)
        parser.finalize()
    except FormParserError as error:
        raise BadRequest(f"The form is not valid multipart/form-data: {error}.") from error
    if not reader.complete:
        raise BadRequest("The form is incomplete: its closing boundary is missing.")
    return reader.form


class _FormReader:
    """Collects parts from the parser's callbacks."""

    def __init__(self, file_name: str) -> None:
        self.form = Form()
        self.complete = False
        self._file_name = file_name
        self._parts = 0
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._body = io.BytesIO()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(f"The form has more than {MAX_PARTS} parts.")
        self._headers = {}
        self._body = io.BytesIO()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        if not self._name:
            raise BadRequest("A part of the form has no name in its content-disposition.")
        if self._name == self._file_name and self.form.file is not None:
            raise BadRequest(f"The form has more than one {self._name}; send one.", param=self._name)

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._body.write(memoryview(data)[start:end])
        if self._name != self._file_name and self._body.tell() > MAX_FIELD_BYTES:
            raise BadRequest(f"{self._name[:60]} is larger than {MAX_FIELD_BYTES} bytes.", param=self._name)

    def _end(self) -> None:
        content = self._body.getvalue()  # does not copy
        if self._name == self._file_name:
            self.form.file = content
            return
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"{self._name[:60]} is not valid UTF-8.", param=self._name) from error
        if not self._name.endswith("[]"):
            self.form.fields[self._name] = text
            return
        listed = self.form.fields.setdefault(self._name.removesuffix("[]"), [])
        if isinstance(listed, list):
            listed.append(text)

    def _finish(self) -> None:
        self.complete = True
