"""Echoes the prompt before a choice's first delta: its text (`echo`) and the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millstream.service.generation.model import GenerationModel
from millstream.text.tokenizer import Tokenizer
from millstream.types import Delta, GenerationRequest, PromptToken, TextLogprob, TextPrompt, TokenLogprob


def prompt_logprobs(request: GenerationRequest) -> int | None:
    """Returns how many top tokens the engine must report per prompt position. None for no log-probabilities at all."""
    echoed = request.logprobs if request.echo else None
    wanted = [top for top in (echoed, request.prompt_logprobs) if top is not None]
    return max(wanted, default=None)


class PromptEcho:
    """Collects prompt log-probabilities. The engine prefills before it decodes, so they are complete when the first
    delta is emitted."""

    def __init__(self, request: GenerationRequest, text: str, prompt: tuple[int, ...], tokenizer: Tokenizer) -> None:
        self._text = text
        self._top_echoed = request.logprobs if request.echo else None
        self._top_options = request.prompt_logprobs
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0
        first = replace(
            text_logprob(tokenizer, TokenLogprob(prompt[0], 0.0), offset=self._place(prompt[0])), logprob=None
        )
        self._logprobs = [] if self._top_echoed is None else [first]
        self._options = [] if self._top_options is None else [PromptToken()]

    @classmethod
    def create(
        cls, request: GenerationRequest, prompt_index: int, prompt: tuple[int, ...], model: GenerationModel
    ) -> PromptEcho | None:
        """Returns None if the request asks for neither the prompt's text nor its log-probabilities."""
        if not request.echo and request.prompt_logprobs is None:
            return None
        text = ""
        if request.echo:
            sent = request.prompts[prompt_index]
            text = sent.text if isinstance(sent, TextPrompt) else model.tokenizer.decode(prompt)
        return cls(request, text, prompt, model.tokenizer)

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Converts the log-probabilities of one prefill chunk. All at once would block the event loop."""
        if self._top_echoed is not None:
            self._logprobs += [
                text_logprob(self._tokenizer, each, self._top_echoed, offset=self._place(each.token))
                for each in logprobs
            ]
        if self._top_options is not None:
            self._options += [self._prompt_token(each, self._top_options) for each in logprobs]

    @property
    def length(self) -> int:
        """Characters of the text."""
        return len(self._text)

    def _place(self, token: int) -> int:
        """Where the next token begins in the text. A special token was written there, or added by the tokenizer."""
        begin = self._offset
        if self._tokenizer.is_special(token):
            name = self._tokenizer.name(token) or ""
            self._offset += len(name) if self._text.startswith(name, begin) else 0
        else:
            self._offset += len(self._detokenizer.push((token,)))
        return min(begin, len(self._text))

    def prepend_to(self, delta: Delta) -> Delta:
        text = self._text + delta.text
        return replace(delta, text=text, logprobs=(*self._logprobs, *delta.logprobs), prompt=tuple(self._options))

    def _prompt_token(self, logprob: TokenLogprob, top: int) -> PromptToken:
        """Returns the prompt's own token first, then the top tokens."""
        likeliest = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top[:top], 1)]
        others = [option for option in likeliest if option[0] != logprob.token]
        options = [(logprob.token, logprob.logprob, logprob.rank or 0), *others]
        return PromptToken(tuple((token, self._token_text(token), value, rank) for token, value, rank in options))

    def _token_text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def text_logprob(
    tokenizer: Tokenizer, logprob: TokenLogprob, max_top: int | None = None, *, offset: int = 0
) -> TextLogprob:
    """Returns the log-probability with tokens as text and bytes, and at most `max_top` top tokens. `offset`: where the
    token begins in the text."""
    data = tokenizer.token_bytes(logprob.token)
    top = []
    for token, value in logprob.top[:max_top]:
        other = tokenizer.token_bytes(token)
        top.append((other.decode("utf-8", "replace"), other, value))
    return TextLogprob(data.decode("utf-8", "replace"), data, logprob.logprob, tuple(top), offset)
