"""`millstream doctor`: check this machine and the installation, and say how to repair what is wrong.

Uses the standard library only, and tries everything else in child processes: it must run where nothing else does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator

from millstream.cli.arguments import port, seconds
from millstream.cli.doctor.finding import Finding
from millstream.cli.doctor.mlx_checks import check_mlx
from millstream.cli.doctor.network_checks import check_network
from millstream.cli.doctor.package_checks import check_packages
from millstream.cli.doctor.python_checks import check_python
from millstream.cli.doctor.system_checks import check_system
from millstream.cli.parser import examples
from millstream.cli.versions import version_line

CHECKS: dict[str, Callable[[argparse.Namespace], Iterator[Finding]]] = {
    "python": lambda arguments: check_python(),
    "packages": lambda arguments: check_packages(arguments.timeout),
    "mlx": lambda arguments: check_mlx(arguments.timeout),
    "system": lambda arguments: check_system(),
    "network": lambda arguments: check_network(arguments.port),
}

_COLOURS = {"ok": "32", "warning": "33", "problem": "31"}
_WIDTH = max(len(name) for name in _COLOURS)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine and the installation",
        description="Check Python, packages, MLX and its device, memory, disk, ports and settings. Each finding is ok, "
        "a warning or a problem, with the command that repairs it. The exit code is 1 if there is a problem.",
        epilog=examples(
            ("millstream doctor", "check everything"),
            ("millstream doctor --port 9000", "check another port than 8000"),
            ("millstream doctor --json", "for a program, or for a bug report"),
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=CHECKS, help="run one group of checks; may be repeated")
    parser.add_argument("--port", type=port, default=8000, help="port that the server would use; default: 8000")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=120.0, help="longest wait for MLX to start; default: 120"
    )


def run(arguments: argparse.Namespace) -> int:
    findings = []
    if not arguments.json:
        print(version_line(), flush=True)
    for finding in check(arguments):
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    counts = {status: sum(finding.status == status for finding in findings) for status in ("problem", "warning")}
    if arguments.json:
        report = {"version": version_line(), **counts, "findings": [dataclasses.asdict(item) for item in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(_summary(counts["problem"], counts["warning"]))
    return 1 if counts["problem"] else 0


def check(arguments: argparse.Namespace) -> Iterator[Finding]:
    for name in arguments.only or CHECKS:
        yield from CHECKS[name](arguments)


def _line(finding: Finding) -> str:
    status = finding.status.ljust(_WIDTH)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        status = f"\x1b[{_COLOURS[finding.status]}m{status}\x1b[0m"
    text = f"{status}  {finding.check}: {finding.detail}"
    if finding.fix:
        text += f"\n{' ' * _WIDTH}  fix: {finding.fix}"
    return text.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8")


def _summary(problems: int, warnings: int) -> str:
    if not problems and not warnings:
        return "\nEverything is fine."
    counted = [
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((problems, "problem"), (warnings, "warning"))
        if count
    ]
    return f"\n{' and '.join(counted)}. " + ("Fix the problems first." if problems else "The server will run.")
