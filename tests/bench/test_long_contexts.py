"""bench/long_contexts.py and bench/agents_day.py: what they compute and print, and both against a server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer

import agents_day
import long_contexts
import models
import servers
from conversations import Conversation, Shape
from long_rows import SMALL, Sizes, gaps, memory_figures, tokens_held
from long_table import quantity, table
from millstream.bench.client import Sample
from millstream.config import Settings
from prompts import Prompts, text_of
from support.server import running
from targets import Running, Target

SIZES = Sizes(
    short_streams=3,
    short_prompt=12,
    output_tokens=5,
    rounds=2,
    counts=(1, 3),
    prompt=80,
    beside_streams=2,
    beside_prompts=2,
    join_streams=2,
    join_prompt=200,
    join_output=50_000,
    settle=0.05,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model(tmp_path_factory.mktemp("long") / "tiny", models.TINY)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running(Settings((str(folder),), port=0, max_batch=8)) as server:
        yield server.url


def test_gaps_are_those_that_touch_the_time_between() -> None:
    sample = Sample(0.0, [1.0, 2.0, 4.0, 5.0, 9.0])
    assert gaps([sample], 2.5, 4.5) == [2.0, 1.0]
    assert gaps([sample, sample], 8.0, 8.5) == [4.0, 4.0]
    assert gaps([sample], 9.0, 20.0) == []


def test_tokens_are_counted_at_a_moment() -> None:
    rows = [Sample(0.0, [1.0, 2.0, 3.0]), Sample(0.0, [2.5])]
    assert tokens_held(rows, 100, 2.0) == 202
    assert tokens_held(rows, 100, 9.0) == 204


def test_memory_is_compared_with_what_the_tokens_need() -> None:
    empty = {"memory_bytes": 1000, "prefix_cache_bytes": 10, "kv_bytes_per_token": 4}
    full = {"memory_bytes": 1700, "prefix_cache_bytes": 110, "kv_bytes_per_token": 4}
    found = memory_figures(empty, full, 100)
    assert (found["kv_bytes"], found["kv_over_tokens"], found["kv_and_cache_over_tokens"]) == (600, 1.5, 1.75)
    assert memory_figures({}, {"id": 0}, 100) == {"tokens_held": 100}  # a peer


def test_the_table_has_a_line_per_figure_and_a_column_per_server() -> None:
    results: long_contexts.Results = {
        "short": {"millstream": {"tokens_per_second": 950.0}, "before": {"tokens_per_second": 1000.0}},
        "queue 8": {"millstream": {"first_p50": 610.0}, "before": {"error": "503"}, "mlx-lm": {"first_p50": 12_500.0}},
        "queue 32": {"millstream": {"first_p50": 2200.0}},
    }
    lines = table(results, Sizes(), ["millstream", "before", "mlx-lm"]).splitlines()
    assert lines[0] == "|  | millstream | before | mlx-lm | millstream / before |"
    assert "| 8,000 tokens, 8 at once: first token, median | 0.61 s | failed | 12.5 s |  |" in lines
    assert "| 8,000 tokens, 32 at once: first token, median | 2.2 s |  |  |  |" in lines
    assert lines[-1] == "| 64 short streams: tokens/s | 950 | 1,000 |  | 0.95 |"
    assert {line.count("|") for line in lines} == {6}


def test_quantities() -> None:
    assert quantity(1234.5, "ms") == "1,234 ms"
    assert quantity(2.345, "times") == "2.35 times"
    assert quantity(1500.0, "s") == "1.5 s"
    assert quantity(5 * 2**20, "bytes") == "5 MiB"
    assert quantity(5 * 2**30, "bytes") == "5 GiB"


def test_the_command_line_changes_single_sizes() -> None:
    assert long_contexts.sizes_of(long_contexts.parse([])) == Sizes()
    small = long_contexts.sizes_of(long_contexts.parse(["--small", "--counts", "1,4", "--join-prompt", "9"]))
    assert (small.counts, small.join_prompt, small.prompt) == ((1, 4), 9, SMALL.prompt)
    assert long_contexts.parse(["--before", "x", "--peer", "mlx-lm"]).servers == ["millstream", "before", "mlx-lm"]
    with pytest.raises(SystemExit):
        long_contexts.parse(["--rows", "longest"])
    day = agents_day.sizes_of(agents_day.parse(["--small", "--turns", "2", "--streams", "7"]))
    assert (day.shape.turns, day.streams, day.conversations) == (2, 7, agents_day.SMALL.conversations)


@pytest.mark.parametrize("as_text", [False, True])
def test_prompts_have_the_wanted_length_and_nothing_in_common(
    folder: Path, tokenizer: Tokenizer, as_text: bool
) -> None:
    first, again = Prompts(folder, as_text=as_text), Prompts(folder, as_text=as_text)
    made = [first.make(60), first.make(60)]
    assert made == [again.make(60), again.make(60)]
    ids = [tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt for prompt in made]
    assert [len(one) for one in ids] == [60, 60]
    assert ids[0][:16] != ids[1][:16]


def test_output_of_a_random_model_becomes_the_same_tokens_again(tokenizer: Tokenizer) -> None:
    ids = [random.Random(0).randrange(300, 2000) for _ in range(50)]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_a_conversation_is_sent_whole_and_ends_with_its_size(tokenizer: Tokenizer) -> None:
    shape = Shape(tokens=1000, turns=4, system=200, answer=50)
    conversation, other = Conversation(shape, tokenizer, 0), Conversation(shape, tokenizer, 1)
    sent = conversation.ask()
    conversation.answered(text_of(tokenizer, random.Random(7), shape.answer))
    longer = conversation.ask()
    assert [message["role"] for message in longer] == ["system", "user", "assistant", "user"]
    assert longer[:2] == sent
    assert other.ask()[0] == sent[0]
    assert other.messages[1] != sent[1]
    count = sum(len(tokenizer.encode(message["content"]).ids) for message in longer)
    assert count == shape.system + 2 * shape.result + shape.answer
    assert shape.system + shape.turns * (shape.result + shape.answer) == shape.tokens


def test_every_row_is_measured(url: str, folder: Path) -> None:
    """A server that refuses every request beside ours: its errors are noted, and cost the others nothing."""
    ours = Target("millstream", urlsplit(url), "", Prompts(folder, as_text=False))
    wrong = Target("mlx-lm", urlsplit(url), "nobody", Prompts(folder, as_text=True))
    results: long_contexts.Results = {}
    rows = ("short", "queue", "beside")

    async def measure() -> None:
        await long_contexts.attempt(results, "join", ours, long_contexts.long_rows.join(ours, SIZES))
        await long_contexts.measure_together([ours, wrong], rows, SIZES, ("short", "queue"), results)

    asyncio.run(measure())
    assert set(results) == {"warm-up", "short", "queue 1", "queue 3", "beside", "join"}
    for row in ("short", "queue 1", "queue 3", "beside", "join"):
        assert None not in results[row]["millstream"].values()
        assert "error" not in results[row]["millstream"]
    assert "error" in results["queue 3"]["mlx-lm"]
    assert "mlx-lm" not in results["beside"]
    joined = results["join"]["millstream"]
    assert joined["tokens_held"] > 224  # type: ignore[operator]
    assert joined["kv_over_tokens"] > 0  # type: ignore[operator]
    assert "failed" in table(results, SIZES, ["millstream", "mlx-lm"])


def test_a_stream_that_ends_too_early_fails_the_measurement(url: str, folder: Path) -> None:
    target = Target("millstream", urlsplit(url), "", Prompts(folder, as_text=False))

    async def run() -> None:
        async with Running() as streams:
            await streams.add(target, [target.body(5, 1)])
            patience = time.monotonic() + 30
            while time.monotonic() < patience:
                streams.check()
                await asyncio.sleep(0.01)

    with pytest.raises(long_contexts.Failure, match="too early"):
        asyncio.run(run())


def test_a_day_of_two_agents(url: str, folder: Path) -> None:
    shape = Shape(tokens=400, turns=3, system=60, answer=6)
    sizes = agents_day.Sizes(2, 1, 10, 8, 0.01, shape)
    day = asyncio.run(agents_day.live(urlsplit(url), folder, sizes))
    assert sorted((turn.conversation, turn.number) for turn in day.turns) == [(c, n) for c in (0, 1) for n in range(3)]
    later = [turn for turn in day.turns if turn.number]
    assert all(0 < turn.cached_tokens <= turn.reusable_tokens < turn.prompt_tokens for turn in later)
    assert day.moments
    assert day.gaps


def test_an_older_build_is_run_from_its_own_source(tmp_path: Path) -> None:
    with (
        pytest.raises(servers.NotStarted, match="no millstream"),
        servers.running("millstream", tmp_path, source=tmp_path),
    ):
        pass
    (tmp_path / "millstream").mkdir()
    (tmp_path / "millstream" / "__init__.py").touch()
    (tmp_path / "millstream" / "__main__.py").write_text("raise SystemExit(7)")
    with pytest.raises(servers.NotStarted, match="code 7"), servers.running("millstream", tmp_path, source=tmp_path):
        pass


def test_a_refused_request_ends_the_day(url: str, folder: Path) -> None:
    too_long = 2 * models.TINY["max_position_embeddings"]
    sizes = agents_day.Sizes(1, 1, too_long, 8, 60.0, Shape(tokens=400, turns=3, system=60, answer=6))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(agents_day.live(urlsplit(url), folder, sizes))
    error = agents_day.innermost(caught.value)
    assert isinstance(error, long_contexts.Failure)
    assert str(error).startswith("400")
