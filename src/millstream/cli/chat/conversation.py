"""The conversation of a chat: what is sent to the server, and what `/save` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.cli.chat.images import Image
from millstream.cli.chat.settings import SETTINGS
from millstream.errors import BadRequest

_FORMAT = "millstream-chat-1"


@dataclass(slots=True)
class Conversation:
    """`messages` has no system message: `system` may change at any time."""

    model: str
    system: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str, images: Sequence[Image] = ()) -> None:
        parts = [*(image.part() for image in images), {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": parts if images else text})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def body(self, *, stream: bool) -> dict[str, object]:
        """The request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.messages], "stream": stream} | self.settings
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    def drop_answer(self) -> bool:
        """Forget the latest answer, so that it can be given anew. False if nothing was asked."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def drop_question(self) -> str | None:
        """Forget the latest question and its answer. Returns the question's text; None if there was none."""
        if not self.drop_answer():
            return None
        content = self.messages.pop()["content"]
        return content if isinstance(content, str) else str(content[-1]["text"])

    def save(self, file: Path) -> None:
        """Only the user may read the file: it has what was said."""
        fields = {
            "format": _FORMAT,
            "model": self.model,
            "system": self.system,
            "settings": self.settings,
            "messages": self.messages,
        }
        try:
            descriptor = os.open(file.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as out:
                json.dump(fields, out, ensure_ascii=False, indent=1)
        except OSError as error:
            raise BadRequest(f"{file} cannot be written: {error.strerror or error}.") from None

    def restore(self, file: Path) -> None:
        """Continue a saved conversation, with the model of now. Raises `BadRequest` and changes nothing if it is
        none."""
        try:
            fields = json.loads(file.expanduser().read_text(encoding="utf-8"))
            if fields["format"] != _FORMAT:
                raise ValueError("format")
            system, settings, messages = str(fields["system"]), dict(fields["settings"]), list(fields["messages"])
            if any(message["role"] not in ("user", "assistant") for message in messages):
                raise ValueError("role")
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror or error}.") from None
        except (ValueError, KeyError, TypeError):
            raise BadRequest(f"{file} is not a conversation that /save wrote.") from None
        self.system = system
        self.settings = {name: value for name, value in settings.items() if name in SETTINGS}
        self.messages = messages
