"""A whole server whose model writes what a test says: real HTTP, real templates and tokens, no weights."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from millstream.config import ModelSpec, Settings
from millstream.engine.generation.messages import Generate
from millstream.engine.generation.plan import Plan, StepResult
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import running
from support.tiny import write_servable

TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


class ScriptedServer:
    """`answer` is what the model writes next. `prompts` are the prompts that it got, as text. `submits`: the
    requests to its engine. `delay` is how many seconds a token takes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.url = ""
        self.answer: str | Callable[[str], str] = "Hello."
        self.prompts: list[str] = []
        self.submits: list[Generate] = []
        self.delay = 0.0
        self._tokenizer = tokenizer

    def make(self, source: ModelSource, settings: Settings) -> ScriptedBackend:
        return _PacedBackend(self)

    def script(self, submit: Generate) -> Sequence[int]:
        prompt = self._tokenizer.decode(submit.prompt, skip_special_tokens=False)
        self.prompts.append(prompt)
        self.submits.append(submit)
        text = self.answer if isinstance(self.answer, str) else self.answer(prompt)
        return self._tokenizer.encode(text + "<|im_end|>").ids


class _PacedBackend(ScriptedBackend):
    def __init__(self, server: ScriptedServer) -> None:
        super().__init__(server.script, context_length=4096, drafters=("prediction",))
        self._server = server

    def step(self, plan: Plan) -> StepResult:
        time.sleep(self._server.delay)
        return super().step(plan)


@contextmanager
def scripted_server(folder: Path, *others: ModelSpec, **settings: Any) -> Iterator[ScriptedServer]:
    """`folder` does not exist yet. `others` are real models of other kinds. `settings` are fields of `Settings`."""
    write_servable(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    subject = ScriptedServer(tokenizer)
    with running(Settings((str(folder), *others), port=0, **settings), subject.make) as server:
        subject.url = server.url
        yield subject
