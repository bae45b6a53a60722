"""Does MLX work here? Its builds by their metadata, then MLX itself in a child process with a time limit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.cli.doctor.finding import Finding, gigabytes, install, ok, problem, uninstall, warning
from millstream.cli.doctor.nvidia import driver_version
from millstream.cli.versions import MLX_BUILDS, installed, mlx_builds

_DRIVERS = {"mlx-cuda-13": 580, "mlx-cuda-12": 525}
"""The oldest driver of each build."""
_WORDS = {
    "": "before it could be imported",
    "start": "while a BLAS library was loaded",
    "blas": "while it was imported",
    "import": "when it was asked for its device",
    "device": "at a first matmul",
}
"""What a probe was doing, by the last stage that it had finished."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What the child process reported."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""
    """The last one that was finished; `compute` if all were."""
    code: int | None = 0
    """None: it ran out of time."""
    error: str = ""


def check_mlx(limit: float) -> Iterator[Finding]:
    builds = mlx_builds()
    driver = driver_version()
    extra = "cpu" if driver is None else "cuda" if driver >= _DRIVERS["mlx-cuda-13"] else "cuda12"
    wanted = "mlx" if sys.platform == "darwin" else f"millstream[{extra}]"
    broken = list(check_builds(installed("mlx"), builds, wanted))
    yield from broken
    found = probe(limit)
    yield from judge(found, wanted, reported=bool(broken))
    yield from check_driver(builds, driver)


def check_builds(mlx: str | None, builds: Mapping[str, str], wanted: str) -> Iterator[Finding]:
    """By their metadata only."""
    if mlx is None:
        yield problem("mlx", "MLX is not installed.", install(wanted))
    elif len(builds) > 1:
        names = " and ".join(builds)
        yield problem(
            "mlx", f"{names} are both installed, and overwrite each other's files.",
            f"{uninstall(*builds, 'mlx')}; then {install(wanted)}",
        )  # fmt: skip
    elif not builds:
        yield problem("mlx", f"MLX {mlx} is installed without a build for this machine.", install(wanted))
    elif (version := next(iter(builds.values()))) != mlx:
        name = next(iter(builds))
        yield problem("mlx", f"mlx {mlx} and {name} {version} do not fit each other.", install(f"{name}=={mlx}"))


def probe(limit: float) -> Probe:
    command = [sys.executable, "-P", "-m", "millstream.backend.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, err = None, _text(late.stdout), _text(late.stderr)
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith('{"stage"'):
            facts |= json.loads(line)
    last = err.strip().splitlines()[-1:] or [""]
    return Probe(facts, str(facts.get("stage", "")), code, last[0][:300])


def judge(found: Probe, wanted: str, *, reported: bool) -> Iterator[Finding]:
    """`reported`: a finding about the builds has said already why MLX does not work."""
    facts = found.facts
    if found.stage != "compute":
        if not reported or "No module named" not in found.error:
            yield problem("mlx", _failure(found), install("--force-reinstall", wanted))
        return
    if not facts.get("right"):
        yield problem("mlx", "MLX computes wrong results on this machine.", install("--force-reinstall", wanted))
        return
    yield ok("mlx", f"MLX {facts['version']} on {facts['kind']} ({facts['name']}), {gigabytes(facts['memory'])}")
    if facts.get("working_set"):
        yield ok("gpu memory", f"models may take {gigabytes(facts['working_set'])} before the system swaps")
    blas = facts.get("blas")
    if blas is not None and facts["kind"] == "cpu":
        if blas.startswith("reference"):
            yield warning(
                "blas", "No fast BLAS library was found: prompts take ten times longer.", install("millstream[cpu]")
            )
        else:
            yield ok("blas", str(blas))


def check_driver(builds: Mapping[str, str], driver: int | None) -> Iterator[Finding]:
    cuda = [name for name in builds if name in _DRIVERS]
    if driver is not None and not cuda and "mlx-cpu" in builds:
        yield warning(
            "cuda", "There is an NVIDIA GPU, but MLX's build for the CPU is installed.",
            f"{uninstall('mlx-cpu')}; then {install('millstream[cuda]' if driver >= 580 else 'millstream[cuda12]')}",
        )  # fmt: skip
    for name in cuda:
        if driver is None:
            yield problem(
                "cuda", f"{MLX_BUILDS[name]} is installed, but no NVIDIA driver was found.",
                f"install the driver, or use the CPU: {uninstall(name)}; then {install('millstream[cpu]')}",
            )  # fmt: skip
        elif driver < _DRIVERS[name]:
            fix = "update the driver" + ("" if driver < 525 else f", or: {install('millstream[cuda12]')}")
            yield problem("cuda", f"The driver {driver} is too old: {_DRIVERS[name]} or newer for {name}.", fix)
        else:
            yield ok("cuda", f"driver {driver} fits {name}")


def _failure(found: Probe) -> str:
    when = _WORDS.get(found.stage, "")
    if found.code is None:
        return f"MLX did not answer in time, {when}."
    if found.code < 0:
        return f"MLX crashed ({signal.Signals(-found.code).name}) {when}."
    return f"MLX failed {when}: {found.error or f'exit code {found.code}'}"


def _text(output: bytes | str | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""
