"""What an answer says of its prompt: its text again, and how likely its tokens were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millstream.service.generation.model import GenerationModel
from millstream.text.tokenizer import Tokenizer
from millstream.types import Delta, GenerationRequest, PromptToken, TextLogprob, TextPrompt, TokenLogprob


def prompt_logprobs(request: GenerationRequest) -> int | None:
    """How many of the likeliest tokens an engine has to tell of each place of the prompts; None for nothing at all."""
    echoed = request.logprobs if request.echo else None
    wanted = [top for top in (echoed, request.prompt_logprobs) if top is not None]
    return max(wanted, default=None)


class PromptEcho:
    """Stands before the first delta of a choice. The engine reads a prompt before it writes, so it is complete then."""

    def __init__(self, request: GenerationRequest, text: str, prompt: tuple[int, ...], tokenizer: Tokenizer) -> None:
        self._text = text
        self._echoed = request.logprobs if request.echo else None
        self._told = request.prompt_logprobs
        self._tokenizer = tokenizer
        first = replace(describe(tokenizer, TokenLogprob(prompt[0], 0.0)), logprob=None)
        self._logprobs = [] if self._echoed is None else [first]
        self._options = [] if self._told is None else [PromptToken()]

    @classmethod
    def of(
        cls, request: GenerationRequest, place: int, prompt: tuple[int, ...], model: GenerationModel
    ) -> PromptEcho | None:
        """For an answer to the request's prompt number `place`. None if it begins with nothing but itself."""
        if not request.echo and request.prompt_logprobs is None:
            return None
        text = ""
        if request.echo:
            sent = request.prompts[place]
            text = sent.text if isinstance(sent, TextPrompt) else model.tokenizer.decode(prompt)
        return cls(request, text, prompt, model.tokenizer)

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Described as they come, a chunk of the prompt at a time: all at once would hold the event loop up."""
        if self._echoed is not None:
            self._logprobs += [describe(self._tokenizer, each, self._echoed) for each in logprobs]
        if self._told is not None:
            self._options += [self._option(each, self._told) for each in logprobs]

    def before(self, delta: Delta) -> Delta:
        text = self._text + delta.text
        return replace(delta, text=text, logprobs=(*self._logprobs, *delta.logprobs), prompt=tuple(self._options))

    def _option(self, logprob: TokenLogprob, top: int) -> PromptToken:
        likeliest = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top[:top], 1)]
        others = [option for option in likeliest if option[0] != logprob.token]
        options = [(logprob.token, logprob.logprob, logprob.rank or 0), *others]
        return PromptToken(tuple((token, self._name(token), value, rank) for token, value, rank in options))

    def _name(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def describe(tokenizer: Tokenizer, logprob: TokenLogprob, most: int | None = None) -> TextLogprob:
    """With tokens as text and bytes. `most`: how many of the likeliest tokens to name, if there are more."""
    data = tokenizer.token_bytes(logprob.token)
    top = []
    for token, value in logprob.top[:most]:
        other = tokenizer.token_bytes(token)
        top.append((other.decode("utf-8", "replace"), other, value))
    return TextLogprob(data.decode("utf-8", "replace"), data, logprob.logprob, tuple(top))
