"""The `/` commands of a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from millstream.cli.chat.conversation import Conversation
from millstream.cli.chat.images import Image, read_image
from millstream.cli.chat.settings import SETTINGS, read_setting
from millstream.cli.parser import did_you_mean
from millstream.cli.served_models import ServedModel, choose, list_models
from millstream.cli.server_client import ServerClient
from millstream.errors import BadRequest


@dataclass(slots=True)
class Chat:
    """What the commands work on. `say` shows a line to the user."""

    client: ServerClient
    conversation: Conversation
    model: ServedModel
    say: Callable[[str], None]
    images: list[Image] = field(default_factory=list)
    """Attached to the next question."""
    leaving: bool = False
    ask_again: bool = False
    """The question at the end of the conversation is to be answered now."""


def sees_images(model: ServedModel) -> bool:
    """True as well if it is not known yet."""
    return not model.capabilities or "vision" in model.capabilities


def _help(chat: Chat, rest: str) -> None:
    width = max(len(f"/{name} {command.arguments}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        chat.say(f"  {f'/{name} {command.arguments}':<{width}}  {command.help}")
    chat.say('  Several lines: Alt+Enter, or begin and end with """. Paths of images in a question are attached.')
    chat.say("  Ctrl-C stops an answer; twice, or Ctrl-D, leaves.")


def _system(chat: Chat, rest: str) -> None:
    if rest:
        chat.conversation.system = "" if rest == "none" else rest
    chat.say(f"System prompt: {chat.conversation.system}" if chat.conversation.system else "There is no system prompt.")


def _model(chat: Chat, rest: str) -> None:
    models = list_models(chat.client)
    if rest:
        chat.model = choose(models, rest)
        chat.conversation.model = chat.model.name
    for model in models:
        mark = "*" if model.name == chat.model.name else " "
        chat.say(f"{mark} {model.name}  {model.state}")


def _set(chat: Chat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name = name.replace("-", "_").lower()
    if value.strip() == "default" and name in SETTINGS:
        chat.conversation.settings.pop(name, None)
    elif name:
        if not value.strip():
            raise BadRequest(f"Give a value too, for example: /set {name if name in SETTINGS else 'temperature'} 0.2")
        chat.conversation.settings[name] = read_setting(name, value.strip())
    for known in SETTINGS:
        chat.say(f"  {known} = {chat.conversation.settings.get(known, 'default')}")


def _save(chat: Chat, rest: str) -> None:
    chat.conversation.save(_path(rest, "/save chat.json"))
    chat.say(f"Saved {len(chat.conversation.messages)} messages to {rest}")


def _load(chat: Chat, rest: str) -> None:
    chat.conversation.restore(_path(rest, "/load chat.json"))
    chat.say(f"Loaded {len(chat.conversation.messages)} messages from {rest}")


def _retry(chat: Chat, rest: str) -> None:
    if not chat.conversation.drop_answer():
        raise BadRequest("There is no question to answer again yet.")
    chat.ask_again = True


def _undo(chat: Chat, rest: str) -> None:
    question = chat.conversation.drop_question()
    chat.say("There is nothing to undo." if question is None else f"Forgotten: {question[:60]}")


def _clear(chat: Chat, rest: str) -> None:
    chat.conversation.messages.clear()
    chat.images.clear()
    chat.say("The conversation is empty. System prompt and settings are kept.")


def _image(chat: Chat, rest: str) -> None:
    if not sees_images(chat.model):
        raise BadRequest(f"{chat.model.name} cannot see images. /model shows the other models.")
    image = read_image(_path(rest.strip("'\""), "/image photo.jpg"))
    chat.images.append(image)
    chat.say(f"{image.name} goes with your next question.")


def _exit(chat: Chat, rest: str) -> None:
    chat.leaving = True


@dataclass(frozen=True, slots=True)
class Command:
    run: Callable[[Chat, str], None]
    help: str
    arguments: str = ""


COMMANDS = {
    "help": Command(_help, "show these commands"),
    "system": Command(_system, "show or set the system prompt; none removes it", "[TEXT]"),
    "model": Command(_model, "show the models, or change the model", "[NAME]"),
    "set": Command(_set, "show or change settings, e.g. /set temperature 0.2", "[NAME VALUE]"),
    "image": Command(_image, "attach an image to the next question", "PATH"),
    "retry": Command(_retry, "answer the last question again"),
    "undo": Command(_undo, "forget the last question and its answer"),
    "clear": Command(_clear, "begin a new conversation"),
    "save": Command(_save, "write the conversation to a file", "FILE"),
    "load": Command(_load, "continue a conversation from a file", "FILE"),
    "exit": Command(_exit, "leave; also /quit and /bye"),
}
OTHER_NAMES = {"quit": "exit", "bye": "exit", "?": "help"}


def is_command(text: str) -> bool:
    """A message may also begin with the path of a file."""
    word = text.split(maxsplit=1)[0]
    return word.startswith("/") and "/" not in word[1:] and not Path(word).is_file()


def run_command(chat: Chat, text: str) -> None:
    """Raises a `MillstreamError` for what cannot be done, with a suggestion for a command that does not exist."""
    word, _, rest = text[1:].partition(" ")
    name = OTHER_NAMES.get(word.strip().lower(), word.strip().lower())
    if name not in COMMANDS:
        hint = did_you_mean(f"/{name}", (f"/{known}" for known in (*COMMANDS, *OTHER_NAMES)))
        raise BadRequest(f"There is no command /{name}. {hint or 'All commands: /help'}")
    COMMANDS[name].run(chat, rest.strip())


def _path(text: str, example: str) -> Path:
    if not text:
        raise BadRequest(f"Name a file, for example: {example}")
    return Path(text).expanduser()
