"""The official client, the Responses API, a real MCP server and a store on disk: the server calls the tool itself, and
a restart finds the response and continues it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import tokenizers

from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from support.mcp_clients import stdio_spec
from support.responses import check_events
from support.scripted import ScriptedBackend
from support.scripted_server import TEMPLATE
from support.server import running
from support.tiny import write_servable

TOOL: Any = {"type": "mcp", "server_label": "real", "allowed_tools": ["fail", "add"], "require_approval": "never"}
CALLS = [
    '<tool_call>\n{"name": "real__add", "arguments": {"a": 20, "b": 22}}\n</tool_call>',
    '<tool_call>\n{"name": "real__fail", "arguments": {}}\n</tool_call>',
]


class Model:
    """Calls two tools, one after the other, and answers then."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.prompts: list[str] = []

    def __call__(self, submit: Generate) -> Sequence[int]:
        prompt = self.tokenizer.decode(submit.prompt, skip_special_tokens=False)
        self.prompts.append(prompt)
        answers = prompt.count("<|im_start|>tool")
        text = CALLS[answers] if answers < len(CALLS) else "Done."
        return self.tokenizer.encode(f"{text}<|im_end|>").ids


@contextmanager
def client(folder: Path, model: Model, store: Path) -> Iterator[openai.OpenAI]:
    settings = Settings((str(folder),), port=0, store_dir=store, tool_servers=(stdio_spec("real"),))
    with (
        running(settings, lambda source, settings: ScriptedBackend(model)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as subject,
    ):
        yield subject


def test_a_real_mcp_server_and_a_restart(tmp_path: Path) -> None:
    folder = write_servable(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    model = Model(folder)
    with client(folder, model, tmp_path / "store") as subject:
        events = list(subject.responses.create(model="tiny", input="hi", tools=[TOOL], stream=True))
        check_events([event.to_dict() for event in events])
        response = events[-1].response  # type: ignore[union-attr]
        listed, added, failed, message = response.output
        assert sorted(tool.name for tool in listed.tools) == ["add", "fail"]
        assert (added.output, added.error) == ("42", None)
        assert failed.status == "failed" and "fail" in failed.error.content[0]["text"]
        assert message.content[0].text == "Done."
        first, second, third = model.prompts
        assert second.startswith(first) and third.startswith(second) and "42" in second
    with client(folder, model, tmp_path / "store") as subject:
        assert subject.responses.retrieve(response.id) == response
        again = subject.responses.create(model="tiny", input="go on", tools=[TOOL], previous_response_id=response.id)
        assert again.output_text == "Done." and model.prompts[-1].startswith(third)
