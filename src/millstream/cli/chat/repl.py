"""Talk in the terminal: read a line, run a command or stream an answer, until the user leaves."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from millstream.cli.chat.answer import Answer, stream_answer
from millstream.cli.chat.displays import TerminalDisplay
from millstream.cli.chat.images import take_images
from millstream.cli.chat.prompt_line import PromptLine
from millstream.cli.chat.slash import Chat, is_command, run_command, sees_images
from millstream.cli.chat.waiting import LoadWatcher, Waiting
from millstream.errors import MillstreamError


class Repl:
    def __init__(self, chat: Chat, console: Console, line: PromptLine, *, verbose: bool) -> None:
        self._chat = chat
        self._console = console
        self._line = line
        self._verbose = verbose
        self._interrupted = False
        """Ctrl-C was the last thing that the user did."""

    def run(self) -> None:
        self._note(f"You talk to {self._chat.model.name}. /help shows the commands, Ctrl-D leaves.")
        while not self._chat.leaving:
            try:
                text = self._line.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                if self._interrupted:
                    return
                self._interrupted = self._line.is_empty
                self._note("Press Ctrl-C again to leave." if self._interrupted else "Not sent.")
                continue
            self._interrupted = False
            if text.strip():
                self._handle(text)

    def _handle(self, text: str) -> None:
        """Errors are told, and the chat goes on."""
        try:
            if not is_command(text):
                self._ask(text)
                return
            run_command(self._chat, text)
            if self._chat.ask_again:
                self._chat.ask_again = False
                self._answer()
        except MillstreamError as error:
            self._console.print(Text(error.message, style="red"))

    def _ask(self, text: str) -> None:
        images = list(self._chat.images)
        if sees_images(self._chat.model):
            text, found = take_images(text)
            images += found
            for image in found:
                self._note(f"attached: {image.name}")
        self._chat.conversation.ask(text, images)
        try:
            self._answer()
        except MillstreamError:
            self._chat.conversation.drop_question()  # or the next one would follow a question without an answer
            raise
        self._chat.images.clear()

    def _answer(self) -> None:
        conversation = self._chat.conversation
        waiting = Waiting(self._console, "…")
        with waiting, LoadWatcher(waiting, self._chat.client, conversation.model) as watcher:
            display = TerminalDisplay(self._console, on_first=watcher.stop)
            answer = stream_answer(self._chat.client, conversation, display)
        conversation.answered(answer.text)
        self._tell_end(answer)

    def _tell_end(self, answer: Answer) -> None:
        if answer.stopped:
            self._interrupted = True
            self._note("Stopped. /retry answers again.")
        elif answer.finish_reason == "length":
            self._note("The answer was cut: it reached its limit of tokens. /set max_tokens changes it.")
        if self._verbose and not answer.stopped:
            self._note(answer.summary)

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))
