"""bench/families.py: which servers run when, at which numbers of streams, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import families
import servers
from millstream.bench.report import Figures


def figures(streams: int, rate: float) -> Figures:
    return Figures(streams, 1, 0, 1, 1.0, rate, 20.0, 30.0, 2.0, 5.0, 9.0, None, None, 0, None)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What happens, in order."""
    found: list[str] = []

    @contextmanager
    def running(server: str, folder: Path, extra: tuple[str, ...] = ()) -> Iterator[str]:
        if folder.name == "broken" and server == families.PEER:
            raise servers.NotStarted("it exited")
        found.append(f"start {server} {folder.name}")
        yield f"http://{server}"
        found.append(f"stop {server} {folder.name}")

    async def measure(load: object, levels: tuple[int, ...], *, warmup: bool) -> list[Figures]:
        numbers = ",".join(map(str, levels))
        if found[-1].startswith("measure"):
            found[-1] += f",{numbers}"
        else:
            found.append(f"measure {numbers}")
        ours = found[-2].startswith(f"start {families.OURS}")
        return [figures(streams, 600.0 if ours else 100.0) for streams in levels]

    monkeypatch.setattr(servers, "running", running)
    monkeypatch.setattr(families, "measure", measure)
    monkeypatch.setattr(families, "find", lambda family: tmp_path / family)
    monkeypatch.setattr(families, "paths", lambda url: "")
    return found


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["families.py", *arguments])
    return families.main()


def test_a_peer_starts_when_ours_has_stopped(
    events: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "--families", "a,b", "--levels", "1,32,64", "--out", str(tmp_path / "report")) == 0
    assert events == [
        f"{what} {server} {family}" if what != "measure" else f"measure {levels}"
        for family in ("a", "b")
        for server, levels in (("millstream", "1,32,64"), ("mlx-lm", "1,32"))
        for what in ("start", "measure", "stop")
    ]
    out = capsys.readouterr().out
    assert "| 32 | 600 | 100 | 6.0 | 20.0 | 2.0 | 5.0 | 2.5 |" in out
    assert "| 64 | 600 |  |  | 20.0 | 2.0 | 5.0 | 2.5 |" in out
    written = json.loads((tmp_path / "report" / "figures.json").read_text())
    assert [level["streams"] for level in written["b"]["mlx-lm"]] == [1, 32]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["1,32", "1,32"]),
        (["--peer-levels", ""], []),
        (["--peer-levels", "1"], ["1", "1"]),
        (["--peer-levels", "1", "b=1,64"], ["1", "1,64"]),
        (["--peer-levels", "a="], ["1,32"]),
        (["--peer-families", "b"], ["1,32"]),
    ],
)
def test_levels_without_a_peer(
    events: list[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: list[str]
) -> None:
    assert call(monkeypatch, "--families", "a,b", "--levels", "1,32,64", *arguments) == 0
    measured = [event for event in events if event.startswith("measure")]
    assert measured.count("measure 1,32,64") == 2
    assert [event.removeprefix("measure ") for event in measured if event != "measure 1,32,64"] == expected


def test_a_peer_that_does_not_start_is_left_out(
    events: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--families", "broken") == 0
    assert events == ["start millstream broken", "measure 1,32,64", "stop millstream broken"]
    assert "left out: it exited" in capsys.readouterr().err
