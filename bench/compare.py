"""Compare Millstream with each installed peer: the same model, machine and load, one server after another.

    python bench/compare.py --model random-1b --levels 1,32,64 --out report/
    python bench/compare.py --model demo --levels 1,4,16 --output-tokens 32

Prints a table per server and the ratios. With --out, writes report.md, figures.json and plot.png.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import sys
from pathlib import Path

from rich.console import Console

import servers
from millstream.bench.load import Load
from millstream.bench.plot import save_plot
from millstream.bench.report import Figures, table
from millstream.cli.bench import measure
from millstream.errors import MillstreamError
from models import find

PEERS = ("mlx-lm", "vllm-mlx", "mlx-vlm")


def main() -> int:
    arguments = parse()
    console = Console(width=110)
    folder = find(arguments.model)
    found: dict[str, list[Figures]] = {}
    wanted = [server for server in ("millstream", *PEERS) if server in arguments.servers]
    for server, url, name in servers.each(wanted, folder, arguments.ours):
        load = Load(
            url=url,
            model=name,
            api=arguments.api,
            prompt_words=arguments.prompt_words,
            output_tokens=arguments.output_tokens,
            requests_per_stream=arguments.requests,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            ignore_eos=server == "millstream",
        )
        levels = asyncio.run(measure(load, arguments.levels, warmup=not arguments.no_warmup))
        found[server] = levels
        console.print(table(server, levels))
        for level in levels:
            if level.first_error:
                console.print(f"{level.errors} errors at {level.streams}: {level.first_error}")
    text = ratios(found)
    console.print(text)
    if arguments.out is not None:
        write(arguments.out, found, text)
    return 0


def ratios(found: dict[str, list[Figures]]) -> str:
    """Ratios of Millstream to each peer, per level."""
    lines = []
    ours = {level.streams: level for level in found.get("millstream", [])}
    for peer in found:
        for level in found[peer] if peer != "millstream" else []:
            mine = ours.get(level.streams)
            if mine is None or not level.tokens_per_second:
                continue
            ratio = mine.tokens_per_second / level.tokens_per_second
            line = f"{level.streams} streams: {ratio:.1f} times {peer}'s tokens/s"
            if mine.first_p50 and level.first_p50:
                line += f", first token {level.first_p50 / mine.first_p50:.1f} times sooner"
            lines.append(line)
    return "\n".join(lines)


def write(out: Path, found: dict[str, list[Figures]], text: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figures = {server: [dataclasses.asdict(level) for level in levels] for server, levels in found.items()}
    (out / "figures.json").write_text(json.dumps(figures, indent=2))
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for server, levels in found.items():
        console.print(table(server, levels))
    report = f"# Comparison\n\n`{' '.join(sys.argv)}` on {platform.platform()}\n\n"
    report += f"```\n{console.export_text()}\n{text}\n```\n"
    try:
        save_plot(out / "plot.png", found)
        report += "\n![plot](plot.png)\n"
    except MillstreamError as error:
        print(error.message, file=sys.stderr)
    (out / "report.md").write_text(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, random-1b, random-tiny or a folder")
    parser.add_argument("--servers", type=lambda text: text.split(","), default=["millstream", *PEERS])
    parser.add_argument("--levels", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4, 16))
    parser.add_argument("--api", choices=("chat", "completions"), default="chat")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--prompt-words", type=int, default=20)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--no-warmup", action="store_true")
    parser.add_argument("--ours", default="", help="extra options for `millstream serve`")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
