"""Messages as bytes, for links that cross a process.

Pickle does the work: both ends are this very program. `Tokens`, of which there is one a row and step, travel as plain
tuples, which cost a tenth of a dataclass.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from millstream.engine.messages import Command, Event, Tokens


def encode_events(events: Sequence[Event]) -> bytes:
    plain = [
        (event.request_id, event.tokens) if type(event) is Tokens and not event.logprobs else event for event in events
    ]
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)


def decode_events(data: bytes) -> list[Event]:
    return [Tokens(*item) if type(item) is tuple else item for item in pickle.loads(data)]


def encode_command(command: Command) -> bytes:
    return pickle.dumps(command, pickle.HIGHEST_PROTOCOL)


def decode_command(data: bytes) -> Command:
    command: Command = pickle.loads(data)
    return command
