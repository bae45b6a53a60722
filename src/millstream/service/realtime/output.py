"""The output items of a response: they grow, and every change is an event. Once closed, nothing is sent any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from millstream.realtime_types import (
    ArgumentsDelta,
    ArgumentsDone,
    AudioDelta,
    AudioDone,
    Item,
    ItemAdded,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    Part,
    PartAdded,
    PartDone,
    Place,
    ResponseOptions,
    SpokenTextDelta,
    SpokenTextDone,
    TextDelta,
    TextDone,
)
from millstream.service.ports import Outbox
from millstream.service.realtime.conversation import Conversation, new_id
from millstream.service.realtime.spoken import SpokenText

ItemStatus = Literal["completed", "incomplete"]


class OutputItems:
    def __init__(self, response_id: str, options: ResponseOptions, conversation: Conversation, outbox: Outbox) -> None:
        self._response_id = response_id
        self._speaks = options.config.speaks
        self._conversation = conversation if options.in_conversation else None
        self._outbox = outbox
        self._message: Item | None = None
        self._text = ""
        self._closed = False
        self._items: dict[str, Item] = {}
        """In order."""
        self.spoken = SpokenText()
        self.spoken_id = ""
        """The message that is spoken."""

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items.values())

    def write(self, text: str) -> None:
        if self._closed:
            return
        if self._message is None:
            self._open_message()
        self._text += text
        self._outbox.put(SpokenTextDelta(self._place, text) if self._speaks else TextDelta(self._place, text))

    def begin_sentence(self, text: str) -> None:
        self.spoken.begin(text)

    def add_audio(self, audio: bytes, ms: float) -> None:
        if not self._closed:
            self.spoken.add_audio(ms)
            self._outbox.put(AudioDelta(self._place, audio))

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """A whole call: one that is not valid is found only at its end."""
        if self._closed:
            return
        self.close_message("completed")
        item = Item(new_id("item"), "function_call", "in_progress", call_id=call_id, name=name)
        self._add(item)
        place = Place(self._response_id, item.id, len(self._items) - 1)
        self._outbox.put(ArgumentsDelta(place, call_id, arguments))
        self._outbox.put(ArgumentsDone(place, call_id, name, arguments))
        self._done(replace(item, status="completed", arguments=arguments))

    def close_message(self, status: ItemStatus) -> None:
        """Ends the message, if there is one. One that is incomplete keeps what was said of it."""
        if self._message is None or self._closed:
            return
        place, message = self._place, self._message
        self._message = None
        if self._speaks:
            text = self._text if status == "completed" else self.spoken.text
            part = Part("output_audio", text)
            self._outbox.put(AudioDone(place))
            self._outbox.put(SpokenTextDone(place, text))
        else:
            part = Part("output_text", self._text)
            self._outbox.put(TextDone(place, self._text))
        self._outbox.put(PartDone(place, part))
        self._done(replace(message, status=status, parts=(part,)))

    def close(self, status: ItemStatus) -> None:
        self.close_message(status)
        self._closed = True

    @property
    def _place(self) -> Place:
        assert self._message is not None
        return Place(self._response_id, self._message.id, list(self._items).index(self._message.id))

    def _open_message(self) -> None:
        self._message = Item(new_id("item"), status="in_progress", role="assistant")
        self._add(self._message)
        if self._speaks:
            self.spoken_id = self._message.id
        self._outbox.put(PartAdded(self._place, Part("output_audio" if self._speaks else "output_text", "")))

    def _add(self, item: Item) -> None:
        previous = None
        if self._conversation is not None:
            self._conversation.make_room()
            previous = self._conversation.add(item)
        self._items[item.id] = item
        self._outbox.put(OutputItemAdded(self._response_id, len(self._items) - 1, item))
        if self._conversation is not None:
            self._outbox.put(ItemAdded(item, previous))

    def _done(self, item: Item) -> None:
        self._items[item.id] = item
        if self._conversation is not None and self._conversation.has(item.id):
            self._conversation.replace(item)
            self._outbox.put(ItemDone(item, self._conversation.previous(item.id)))
        self._outbox.put(OutputItemDone(self._response_id, list(self._items).index(item.id), item))
