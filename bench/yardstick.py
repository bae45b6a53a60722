"""Every model type against mlx-lm's server and against a plain loop without a server: the same weights, prompts and
machine, one after the other.

    python bench/yardstick.py --levels 1,4,16 --output-tokens 32        every type, small, on two CPU cores: hours
    python bench/yardstick.py qwen3_5 gemma4_text --size large          these, at a real size (a GPU)
    python bench/yardstick.py gemma3-1b ./folder --variants fast        shapes of bench/models.py, or folders

Whether the answers are right is asked by bench/equality.py.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import servers
from families import names, numbers, say
from millstream.bench.load import Load
from millstream.cli.bench import measure
from model_types import NotMade, model_types
from models import RANDOM, find

PEER, LIMIT = "mlx-lm", "limit"
VARIANTS = {
    "fast": "",
    "general": "--disable kernel --disable fused-matmul --disable packed-matmul --disable compiled-step",
    "arena": "--layout arena",
    "arena-built": "--layout arena-built",
}
"""Options of `millstream serve`: every fast path, and MLX's own operations, which are what a Mac runs."""
TOKENS_PER_WORD = 5.6
"""The tokenizer of these models has no words, only bytes."""
HEADINGS = (
    "type",
    "streams",
    "server",
    "tokens/s",
    "of mlx-lm",
    "of the limit",
    "first p50, ms",
    "worst, ms",
    "gap p99",
)


@dataclasses.dataclass(frozen=True)
class Row:
    streams: int
    tokens_per_second: float
    first_p50: float
    first_worst: float
    gap_p99: float | None = None
    note: str = ""


Rows = dict[str, list[Row]]
"""By server."""


def main() -> int:
    arguments = parse()
    failed = False
    found: dict[str, Rows] = {}
    for name in arguments.types or [*model_types()]:
        try:
            with model(name, arguments.size) as folder:
                found[name] = measured(name, folder, arguments)
        except (NotMade, subprocess.CalledProcessError) as error:
            say(f"{name}: left out: {error}")
            continue
        print("\n".join(table(name, found[name])), flush=True)
        failed = failed or any(variant not in found[name] for variant in arguments.variants)
        if arguments.out is not None:
            write(arguments.out, found)
    return 1 if failed else 0


@contextmanager
def model(name: str, size: str) -> Iterator[Path]:
    """The folder of a model; one that is made here goes with the block, since a hundred large ones fill a disk."""
    if name.partition("@")[0] in RANDOM or Path(name).is_dir():
        yield find(name)
        return
    with tempfile.TemporaryDirectory(prefix="millstream-yardstick-") as root:
        folder = Path(root) / name
        made = subprocess.run(  # its own process: MLX would hold the model's memory for reuse
            [sys.executable, Path(__file__).with_name("model_types.py"), name, size, folder],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise NotMade(made.stderr.strip().splitlines()[-1] if made.stderr.strip() else f"exit {made.returncode}")
        yield folder


def measured(name: str, folder: Path, arguments: argparse.Namespace) -> Rows:
    rows: Rows = {}
    if LIMIT in arguments.peers:
        rows[LIMIT] = limit(folder, arguments)
        say(f"{name}, {LIMIT}: {spoken(rows[LIMIT])}")
    for server in [*arguments.variants, *(peer for peer in arguments.peers if peer == PEER)]:
        ours = server in VARIANTS
        options = f"--isolation process --log-level error {VARIANTS.get(server, '')} {arguments.ours}".split()
        try:
            with servers.running("millstream" if ours else server, folder, tuple(options) if ours else ()) as url:
                rows[server] = served(url, "" if ours else str(folder), arguments)
        except servers.NotStarted as error:
            say(f"{name}, {server}: left out: {error}")
        else:
            say(f"{name}, {server}: {spoken(rows[server])}")
    return rows


def served(url: str, model_name: str, arguments: argparse.Namespace) -> list[Row]:
    load = Load(
        url=url,
        model=model_name,
        prompt_words=round(arguments.prompt_tokens / TOKENS_PER_WORD),
        output_tokens=arguments.output_tokens,
        requests_per_stream=1,
        temperature=arguments.temperature,
        ignore_eos=not model_name,
        seconds=arguments.seconds,
    )
    rows: list[Row] = []
    for streams in arguments.levels:
        best: Row | None = None
        for number in range(arguments.rounds):
            seeded = dataclasses.replace(load, seed=1000 * number + streams)
            (level,) = asyncio.run(measure(seeded, (streams,), warmup=number == 0))
            note = level.first_error or (f"{level.cut} cut" if level.cut else "")
            first, worst = level.first_p50 or float("inf"), level.first_p99 or float("inf")
            row = Row(streams, level.tokens_per_second, first, worst, level.gap_p99, note)
            if best is None or row.tokens_per_second > best.tokens_per_second:
                best = row
        assert best is not None
        rows.append(best)
    return rows


def limit(folder: Path, arguments: argparse.Namespace) -> list[Row]:
    command = [sys.executable, Path(__file__).with_name("plain_loop.py"), folder]
    command += ["--levels", ",".join(map(str, arguments.levels)), "--rounds", str(arguments.rounds)]
    command += ["--prompt-tokens", str(arguments.prompt_tokens), "--output-tokens", str(arguments.output_tokens)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=arguments.seconds * len(arguments.levels) * 3
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        say(f"the plain loop failed: {lines[-1] if lines else done.returncode}")
        return []
    return [Row(int(rows), **figures) for rows, figures in json.loads(done.stdout).items()]


def table(name: str, rows: Rows) -> list[str]:
    """Lines of a Markdown table, one for each number of streams and server."""
    lines = []
    for server, levels in rows.items():
        for row in levels:
            peer, most = (
                next((each.tokens_per_second for each in rows.get(other, ()) if each.streams == row.streams), 0.0)
                for other in (PEER, LIMIT)
            )
            cells = [
                name,
                str(row.streams),
                server,
                f"{row.tokens_per_second:,.0f}",
                f"{row.tokens_per_second / peer:.2f}" if peer and server != PEER else "",
                f"{row.tokens_per_second / most:.2f}" if most and server != LIMIT else "",
                f"{row.first_p50:,.0f}",
                f"{row.first_worst:,.0f}",
                f"{row.gap_p99:.1f}" if row.gap_p99 is not None else "",
            ]
            lines.append(f"| {' | '.join(cells)} |{' ' + row.note if row.note else ''}")
    return lines


def spoken(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row.streams}: {row.tokens_per_second:,.0f} (first {row.first_p50:,.0f} ms)" for row in rows)


def write(out: Path, found: dict[str, Rows]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    plain = {
        name: {server: [dataclasses.asdict(row) for row in each] for server, each in rows.items()}
        for name, rows in found.items()
    }
    (out / "figures.json").write_text(json.dumps(plain, indent=1))
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    (out / "table.md").write_text("\n".join([*lines, *(line for name in found for line in table(name, found[name]))]))


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types, names of bench/models.py, or folders; else every type")
    parser.add_argument("--size", choices=("small", "large"), default="small", help="of the types' models")
    parser.add_argument("--levels", type=numbers, default=(1, 8, 32), help="numbers of streams")
    parser.add_argument("--variants", type=names, default=("fast", "general"), help=f"of ours: {', '.join(VARIANTS)}")
    parser.add_argument("--peers", type=names, default=(LIMIT, PEER), help=f"{LIMIT}, {PEER}, or nothing")
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many counts")
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60, help="stop a level after so long; what arrived counts")
    parser.add_argument("--ours", default="", help="extra options for `millstream serve`")
    parser.add_argument("--out", type=Path, help="write figures.json and table.md to this folder, after each type")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
