"""Run `millstream chat`: find the server, then talk or ask once."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from millstream.cli.chat.conversation import Conversation
from millstream.cli.chat.images import read_image, take_images
from millstream.cli.chat.one_shot import print_answer, print_response
from millstream.cli.chat.private_server import PrivateServer
from millstream.cli.chat.settings import given_settings
from millstream.cli.chat.slash import Chat, sees_images
from millstream.cli.chat.target import model_and_question, private_source, running_server, served
from millstream.cli.chat.waiting import Waiting
from millstream.cli.served_models import ServedModel, list_models
from millstream.cli.server_client import ServerClient
from millstream.errors import BadRequest

MAX_PIPE = 20_000_000
"""Characters."""


def run(arguments: argparse.Namespace) -> int:
    talking = sys.stdin.isatty() and sys.stdout.isatty()
    piped = None if sys.stdin.isatty() else _read_pipe()
    progress = Console(stderr=True) if sys.stderr.isatty() else None
    running = running_server(arguments.url, arguments.api_key)
    wanted, question = model_and_question(arguments.words, arguments.model, running, piped=piped is not None)
    if not question and not piped and (arguments.json or not talking):
        raise BadRequest("There is nothing to ask: give a question, or pipe a text into the command.")
    model = None if running is None else served(running, wanted, explicit=arguments.url is not None)
    if running is not None and model is not None:
        return _talk(arguments, running.client, model, question, piped, progress)
    with PrivateServer(private_source(wanted)) as server:
        with Waiting(progress, "Starting a server …") as waiting:
            client, model = server.wait_ready(waiting.say)
        return _talk(arguments, client, model, question, piped, progress)


def _talk(
    arguments: argparse.Namespace,
    client: ServerClient,
    model: ServedModel,
    question: str | None,
    piped: str | None,
    progress: Console | None,
) -> int:
    conversation = Conversation(model.name, arguments.system, given_settings(arguments))
    images = [read_image(path) for path in arguments.image]
    if not question and not piped:
        chat = Chat(client, conversation, model, print, images)
        from millstream.cli.chat.prompt_line import PromptLine  # prompt_toolkit: not needed to ask once
        from millstream.cli.chat.repl import Repl

        line = PromptLine(lambda: [served.name for served in list_models(client)])
        Repl(chat, Console(), line, verbose=arguments.verbose).run()
        return 0
    if question and sees_images(model):
        question, found = take_images(question)  # not in what was piped: it may be someone else's text
        images += found
    conversation.ask("\n\n".join(part for part in (question, piped) if part), images)
    if arguments.json:
        return print_response(client, conversation)
    return print_answer(client, conversation, verbose=arguments.verbose, progress=progress)


def _read_pipe() -> str | None:
    """None for no text: an empty pipe is what a program gives that has nothing to say."""
    text = sys.stdin.read(MAX_PIPE + 1)
    if len(text) > MAX_PIPE:
        raise BadRequest(f"The piped text is longer than {MAX_PIPE} characters: no model reads that much.")
    return text.strip() or None
