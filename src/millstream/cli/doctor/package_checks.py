"""Are the packages there that Millstream needs, in versions that work, and can they be imported?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

from millstream.cli.doctor.finding import Finding, install, ok, problem, warning
from millstream.cli.versions import installed
from millstream.installed import audio_command

MODULES = ("numpy", "tokenizers", "llguidance", "orjson", "httptools", "pydantic", "uvicorn", "fastapi", "rich")
"""What the server imports first, most of it compiled: a wheel for another processor fails here."""

EXTRAS = {
    "vision": ("mlx_vlm", "models that see images"),
    "video": ("av", "video and compressed audio"),
    "audio": ("av", "speech as MP3, Opus, FLAC and AAC"),
    "mcp": ("mcp", "tools of MCP servers"),
}

_TRY_IMPORTS = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def check_packages(limit: float) -> Iterator[Finding]:
    required = _requirements()
    if required is None:
        yield warning("packages", "Millstream itself is not installed as a package.", install("millstream"))
    wrong = list(_wrong_versions(required or []))
    yield from wrong
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing and not wrong:
        yield problem("packages", f"missing: {', '.join(missing)}", install(*missing))
    present = [name for name in MODULES if name not in missing]
    failures = list(_failed_imports(present, limit))
    yield from failures
    if not wrong and not missing and not failures:
        yield ok("packages", "all required packages are installed and can be imported")
    yield from _extras()


def _requirements() -> list[str] | None:
    """Those of Millstream without extras; None if there is no metadata."""
    try:
        found = importlib.metadata.requires("millstream") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return [text for text in found if "extra ==" not in text]


def _wrong_versions(required: list[str]) -> Iterator[Finding]:
    """One finding for all that is missing, and one for each that is too old."""
    if not required:
        return
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield problem("packages", "The package 'packaging' is missing.", install("packaging"))
        return
    missing = []
    for text in required:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        version = installed(requirement.name)
        if version is None:
            missing.append(wanted)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield problem(
                "packages", f"{requirement.name} {version} does not fit: {wanted} is needed.", install(wanted)
            )
    if missing:
        yield problem("packages", f"missing: {', '.join(missing)}", install(*missing))


def _failed_imports(names: list[str], limit: float) -> Iterator[Finding]:
    """In a child process: a library for another processor may end it."""
    command = [sys.executable, "-P", "-c", _TRY_IMPORTS]
    try:
        done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=limit, check=False)
        failed = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        yield problem("packages", f"Importing {', '.join(names)} took over {limit:.0f} s.", install(*names))
        return
    if failed is None:
        yield problem("packages", f"Python crashed while it imported {', '.join(names)}.", _reinstall(*names))
        return
    for name, reason in failed.items():
        yield problem("packages", f"{name} cannot be imported: {reason.splitlines()[0][:200]}", _reinstall(name))


def _reinstall(*names: str) -> str:
    return install("--force-reinstall", *names)


def _extras() -> Iterator[Finding]:
    found = "installed" if importlib.util.find_spec("mlx_audio") is not None else f"not installed: {audio_command()}"
    yield ok("extras", f"mlx-audio: {found} (only for speech models besides Whisper and Kokoro)")
    for extra, (module, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield ok("extras", f"{extra}: installed ({purpose})")
        else:
            yield ok("extras", f"{extra}: not installed; only for {purpose}: {install(f'millstream[{extra}]')}")
