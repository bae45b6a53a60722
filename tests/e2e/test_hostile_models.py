"""Broken and hostile models next to a good one, in a real server: each fails quickly with a reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.broken_models import FOLDERS, GGUFS, Broken, content, setting
from support.server import running
from support.tiers import some
from support.tiny import write_servable
from support.tiny_gguf import write_gguf

SHAPES = Path(__file__).parent.parent / "assets" / "shapes-vlm"
SOON = 30.0
"""Seconds. Usually one or two."""
AUTO_MAP = {"AutoModel": "own.Model", "AutoTokenizer": [None, "own.Tokenizer"], "AutoProcessor": "own.Processor"}
CHOSEN = [
    "num_hidden_layers 1000000000",
    "vocab_size 1000000000000",
    "num_attention_heads 1000000000",
    "num_experts 1000000000",
    "vision_config.depth 1000000000",
    "template not UTF-8",
    "tokenizer config a FIFO",
    "weights truncated",
    "config deep",
]


def code_that_leaves_a_mark(mark: Path) -> bytes:
    return f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n".encode()


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["process"]))
def test_each_fails_with_its_reason_and_the_good_one_serves(servable: Path, tmp_path: Path, isolation: str) -> None:
    mark = tmp_path / "it-was-run"
    cases = {broken.name: broken for broken in FOLDERS if broken.name in CHOSEN}
    assert len(cases) == len(CHOSEN)
    specs = [ModelSpec(str(servable), name="good")]
    for number, broken in enumerate(cases.values()):
        folder = shutil.copytree(servable, tmp_path / f"broken-{number}")
        broken.damage(folder)
        specs.append(ModelSpec(str(folder), name=broken.name))
    blocks = next(broken for broken in GGUFS if broken.name == "blocks")
    blocks.damage(write_gguf(tmp_path / "blocks.gguf"))
    specs.append(ModelSpec(str(tmp_path / "blocks.gguf"), name=blocks.name))
    own = Broken("own code", setting("model_file", value="own.py"), "never run")
    hostile = shutil.copytree(SHAPES, tmp_path / "hostile")
    content("own.py", code_that_leaves_a_mark(mark))(hostile)
    own.damage(hostile)
    specs.append(ModelSpec(str(hostile), name=own.name))
    mapped = shutil.copytree(SHAPES, tmp_path / "mapped")
    content("own.py", code_that_leaves_a_mark(mark))(mapped)
    for name in ("config", "tokenizer_config", "processor_config", "preprocessor_config"):
        setting("auto_map", value=AUTO_MAP, file=f"{name}.json")(mapped)
    specs.append(ModelSpec(str(mapped), name="mapped"))
    began = time.monotonic()
    with running(Settings(port=0, models=tuple(specs), isolation=isolation, max_batch=2)) as server:
        assert time.monotonic() - began < SOON
        cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
        states = {name: card["state"] for name, card in cards.items()}
        assert states == {name: "ready" if name in ("good", "mapped") else "failed" for name in cards}
        for broken in [*cases.values(), blocks, own]:
            assert re.search(broken.words, cards[broken.name]["error"]), cards[broken.name]
        for name in ("good", "mapped"):
            body = {"model": name, "prompt": "a red circle", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert not mark.exists()


def test_serving_the_current_folder_imports_no_module_from_it(servable: Path, tmp_path: Path) -> None:
    """`python -m` puts the current folder first on `sys.path`, for the server and for the engine's process."""
    folder = shutil.copytree(servable, tmp_path / "model")
    mark = tmp_path / "code-was-run"
    for name in ("numpy", "mlx", "mlx_lm", "tokenizers", "uvicorn"):
        content(f"{name}.py", code_that_leaves_a_mark(mark))(folder)
    command = [sys.executable, "-m", "millstream", "serve", ".", "--port", "0", "--isolation", "process"]
    search_path = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": search_path}
    ) as server:
        try:
            assert server.stderr is not None
            lines = []
            for line in server.stderr:
                lines.append(line)
                if "ready: " in line or "failed" in line:
                    break
            assert "ready: " in lines[-1], "".join(lines)
        finally:
            server.terminate()
    assert not mark.exists()


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    """The model has 259 embeddings, the tokenizer also token 65000: MLX would read 60 thousand rows past the end."""
    folder = write_servable(tmp_path / "model")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["Q"] = 65_000
    path.write_text(json.dumps(tokenizer))
    with running(Settings(port=0, models=(str(folder),), isolation="process", max_batch=2)) as server:
        for prompt, status in (("Question", 400), ("question", 200)):
            body = {"prompt": prompt, "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == status, answer.text
            assert status == 200 or "'Q', token 65000, but this model has only 259 tokens" in answer.text
