"""Ask one question: the answer goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from millstream.cli import INTERRUPTED
from millstream.cli.chat.answer import PATH, Answer, stream_answer
from millstream.cli.chat.conversation import Conversation
from millstream.cli.chat.displays import PlainDisplay, TerminalDisplay
from millstream.cli.chat.waiting import LoadWatcher, Waiting
from millstream.cli.server_client import ServerClient


def print_answer(client: ServerClient, conversation: Conversation, *, verbose: bool, progress: Console | None) -> int:
    waiting = Waiting(progress, "…")
    with waiting, LoadWatcher(waiting, client, conversation.model) as watcher:
        if sys.stdout.isatty():
            answer = stream_answer(client, conversation, TerminalDisplay(Console(), on_first=watcher.stop))
        else:
            answer = stream_answer(client, conversation, PlainDisplay(sys.stdout))
    return _code(answer, verbose)


def print_response(client: ServerClient, conversation: Conversation) -> int:
    """The whole response as JSON."""
    response = client.post(PATH, conversation.body(stream=False))
    print(json.dumps(response, ensure_ascii=False, indent=2))
    return 0


def _code(answer: Answer, verbose: bool) -> int:
    if answer.stopped:
        return INTERRUPTED
    if answer.finish_reason == "length":
        print("millstream: The answer was cut: it reached its limit of tokens (--max-tokens).", file=sys.stderr)
    if verbose:
        print(f"millstream: {answer.summary}", file=sys.stderr)
    return 0
