"""Prompts that are read in part, over HTTP: who may switch it, and that usage and the list of models tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import Settings
from support.server import RunningServer, running
from support.tiny import write_servable

LONG = "There are seven green boxes behind the door. " * 24
TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("in-part")
    target = write_servable(folder / "tiny", max_position_embeddings=8192)
    draft = write_servable(folder / "draft", max_position_embeddings=8192, num_hidden_layers=1)
    settings = Settings(
        (str(target),),
        port=0,
        max_batch=4,
        isolation="thread",
        draft=str(draft),
        spec_prefill=0.4,
        spec_prefill_tokens=512,
    )
    with running(settings) as server:
        yield server


def usage(server: RunningServer, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_a_long_prompt_is_read_in_part_and_usage_says_so(server: RunningServer) -> None:
    found = usage(server)
    details = found["prompt_tokens_details"]
    assert found["prompt_tokens"] > 1000
    assert details["cached_tokens"] == 0
    assert 0.5 * found["prompt_tokens"] < details["skipped_tokens"] < 0.7 * found["prompt_tokens"]
    # It was not stored as if it were whole.
    assert usage(server)["prompt_tokens_details"] == details


def test_tools_switch_it_off_and_a_request_may_switch_it(server: RunningServer) -> None:
    assert "skipped_tokens" not in usage(server, tools=[TOOL])["prompt_tokens_details"]
    asked = [{"role": "user", "content": f"Count them. {LONG}"}]
    assert usage(server, messages=asked, tools=[TOOL], spec_prefill=True)["prompt_tokens_details"]["skipped_tokens"] > 0
    other = [{"role": "user", "content": f"Not the same. {LONG}"}]
    assert "skipped_tokens" not in usage(server, messages=other, spec_prefill=False)["prompt_tokens_details"]
    short = [{"role": "user", "content": LONG[:300]}]
    assert "skipped_tokens" not in usage(server, messages=short)["prompt_tokens_details"]


def test_the_list_of_models_says_that_it_is_lossy(server: RunningServer) -> None:
    [card] = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert any("answers may miss what it has not read" in note for note in card["notes"])


def test_it_is_true_or_false(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "spec_prefill": 0.3}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "spec_prefill" in answer.text
