"""Each example of examples/ against a real server, with the real package of its registry.

The demo model answers where it can. It knows no tools, so those examples get a model whose output is forced; the one
about a picture gets a small model that was trained on pictures of shapes.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.config import Settings
from support.scripted_server import ScriptedServer, scripted_server
from support.server import RunningServer, running
from support.shapes import draw, some_shapes

FOLDER = Path(__file__).parents[2] / "examples"
ASSETS = Path(__file__).parents[1] / "assets"
NODE_PACKAGES = Path(os.environ.get("MILLSTREAM_NODE_PACKAGES") or "nowhere") / "node_modules"
LIMIT = 180
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def run(command: list[str], url: str, cwd: Path) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "MILLSTREAM_URL": url, "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, url: str, cwd: Path, *arguments: str) -> str:
    text = (FOLDER / name).read_text(encoding="utf-8")
    for package in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return run([sys.executable, str(FOLDER / name), *arguments], url, cwd)


@pytest.mark.parametrize("name", ["chat_openai.py", "chat_anthropic.py", "chat_ollama.py", "chat_langchain.py"])
def test_a_chat(demo: RunningServer, tmp_path: Path, name: str) -> None:
    assert "The capital of France is Paris." in example(name, demo.url, tmp_path)


def test_many_requests(demo: RunningServer, tmp_path: Path) -> None:
    told = example("many_requests.py", demo.url, tmp_path)
    assert "France: The capital of France is Paris." in told and "8 answers in " in told


def test_a_long_document_is_read_once(demo: RunningServer, tmp_path: Path) -> None:
    first, *others = re.findall(
        r"(\d+) tokens in, (\d+) of them cached", example("long_document.py", demo.url, tmp_path)
    )
    assert len(others) == 2
    for total, cached in others:
        assert int(cached) > 0.8 * int(total), (first, others)


def test_structured_output(demo: RunningServer, tmp_path: Path) -> None:
    told = example("structured_output.py", demo.url, tmp_path)
    assert re.match(r"City\(name='.*', country='.*', continent='\w+', is_capital=(True|False)\)", told)


def test_a_stored_conversation(demo: RunningServer, tmp_path: Path) -> None:
    first, second, *_ = example("stored_conversation.py", demo.url, tmp_path).splitlines()
    assert "Paris" in first and second


def test_curl(demo: RunningServer, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = run(["bash", str(FOLDER / "chat.sh")], demo.url, tmp_path).split("\n\n")
    assert len(lines) > 5 and "data: [DONE]" in lines
    assert "Paris" in "".join(lines)


def test_node(demo: RunningServer, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (NODE_PACKAGES / "ai").exists():
        pytest.skip("needs Node, and MILLSTREAM_NODE_PACKAGES with the AI SDK: `make test` sets both up")
    (tmp_path / "node_modules").symlink_to(NODE_PACKAGES)
    shutil.copy(FOLDER / "chat.mjs", tmp_path)
    assert run([node, "chat.mjs"], demo.url, tmp_path) == "The capital of France is Paris.\n"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("examples") / "tiny") as server:
        server.answer = lambda prompt: "It is sunny." if "<|im_start|>tool" in prompt else CALL
        yield server


@pytest.mark.parametrize("name", ["tool_calls.py", "agent.py"])
def test_tools(tool_model: ScriptedServer, tmp_path: Path, name: str) -> None:
    tool_model.prompts.clear()
    called, answered = example(name, tool_model.url, tmp_path).splitlines()
    assert called.startswith("weather(") and "Oslo" in called
    assert answered == "It is sunny."
    assert "20 degrees and sunny in Oslo" in tool_model.prompts[-1]


def test_a_picture(tmp_path: Path) -> None:
    (shape,) = some_shapes(random.Random(3), 1)
    draw([shape], 96).save(tmp_path / "picture.png")
    with running(Settings((str(ASSETS / "shapes-vlm"),), port=0)) as server:
        assert example("images.py", server.url, tmp_path, "picture.png").strip() == shape.name


def test_every_example_is_run_and_listed() -> None:
    """A new example needs a test here and a line in the table."""
    tests = Path(__file__).read_text(encoding="utf-8")
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FOLDER.iterdir():
        if path.suffix in (".py", ".mjs", ".sh"):
            assert path.name in tests, f"{path.name} is not tested"
            assert f"({path.name})" in table, f"{path.name} is not in the table"
