"""Every block of docs/recipes.md, run as it stands there against a real server with the demo model.

In a section, a `toml` block is the file that the text before it names, `millstream serve` starts a server for the rest
of the section, other `sh` and `python` blocks are run, and a `text` block is the output of the one before it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.command import serving
from support.server import RunningServer

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ADDRESS = "http://127.0.0.1:8000"
LIMIT = 180


@dataclass(frozen=True)
class Recipe:
    title: str
    blocks: tuple[tuple[str, str, str], ...]
    """(text before it, language, code)"""


def recipes() -> Iterator[Recipe]:
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        blocks = re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if blocks:
            yield Recipe(title, tuple(blocks))


RECIPES = list(recipes())


def environment() -> dict[str, str]:
    """`python3` and `llm` are those of the environment that the tests run in."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"}


def run(language: str, code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_output(expected: str, output: str) -> None:
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    assert re.fullmatch(pattern, output.strip()), output


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.title for recipe in RECIPES])
def test_a_recipe(recipe: Recipe, demo: RunningServer, tmp_path: Path) -> None:
    code = "\n".join(code for _, _, code in recipe.blocks)
    for word in ("jq", "llm", "curl"):
        if re.search(rf"(?:^|\| ){word} ", code, re.MULTILINE) and not shutil.which(word, path=environment()["PATH"]):
            pytest.skip(f"{word} is not installed")
    url, output = demo.url, None
    with ExitStack() as stack:
        for before, language, code in recipe.blocks:
            if language == "toml":
                (name,) = re.findall(r"`([\w.-]+\.toml)`:\s*$", before)
                (tmp_path / name).write_text(code)
            elif code.startswith("millstream serve"):
                arguments = code.split()[2:]
                server = serving(sys.executable, "-m", "millstream", arguments=arguments, cwd=tmp_path)
                url = stack.enter_context(server)
            elif language == "text":
                assert output is not None
                check_output(code, output)
            else:
                assert ADDRESS in code
                output = run(language, code.replace(ADDRESS, url), tmp_path)


def test_every_recipe_shows_its_output() -> None:
    assert len(RECIPES) >= 8
    for recipe in RECIPES:
        assert recipe.blocks[-1][1] == "text", recipe.title
