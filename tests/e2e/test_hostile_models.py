"""Broken and hostile models next to a good one, in a real server: each fails quickly with a reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from support.audio_files import wav
from support.broken_models import FOLDERS, GGUFS, Broken, content, setting
from support.server import running
from support.spoken import spoken
from support.tiers import some
from support.tiny import write_servable
from support.tiny_encoders import write_encoder
from support.tiny_gguf import write_gguf
from support.tiny_kokoro import write_kokoro
from support.tiny_whisper import write_whisper

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


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def add_far_token(folder: Path, name: str = "Q") -> str:
    """Token 65000, in a vocabulary of a few hundred: MLX would read far beyond the table of embeddings."""
    edited(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({name: 65_000}))
    return str(folder)


def write_far_kokoro(folder: Path) -> str:
    """Its configuration promises more phonemes than its table has rows."""
    write_kokoro(folder)
    edited(folder / "config.json", lambda config: config.update(n_token=70_000))
    edited(folder / "config.json", lambda config: config["vocab"].update(z=65_000))
    return str(folder)


def test_a_token_without_an_embedding_is_refused_by_every_kind_of_model(tmp_path: Path) -> None:
    """What lies in memory beyond the table would be in the answer, or the process would crash."""
    models = (
        ModelSpec(add_far_token(write_servable(tmp_path / "chat")), name="chat"),
        ModelSpec(add_far_token(write_encoder(tmp_path / "embed", "bert", tokenizer=True), "bakery"), name="embed"),
        ModelSpec(str(write_encoder(tmp_path / "gemma", "gemma3_text", tokenizer=True, vocab_size=140)), name="gemma"),
        ModelSpec(
            add_far_token(write_encoder(tmp_path / "rank", "bert", reranker=True, tokenizer=True), "bakery"),
            name="rank",
        ),
        ModelSpec(add_far_token(write_whisper(tmp_path / "ears")), name="ears"),
        ModelSpec(write_far_kokoro(tmp_path / "voice"), name="voice"),
    )
    settings = Settings(port=0, models=models, max_batch=2, disabled=frozenset({"calibration"}))
    with running(settings) as server, httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http:

        def answered(model: str, path: str, **body: Any) -> str | None:
            """None for an answer, else why it was refused."""
            answer = http.post(path, json={"model": model, **body})
            assert answer.status_code in (200, 400), answer.text
            return None if answer.status_code == 200 else answer.json()["error"]["message"]

        def embedded(text: object, model: str = "embed") -> str | None:
            return answered(model, "/embeddings", input=text)

        def transcribed(prompt: str) -> str | None:
            files, data = {"file": ("a.wav", wav(spoken(1.0)))}, {"model": "ears", "prompt": prompt}
            answer = http.post("/audio/transcriptions", files=files, data=data)
            assert answer.status_code in (200, 400), answer.text
            return None if answer.status_code == 200 else answer.json()["error"]["message"]

        assert answered("chat", "/completions", prompt="question", max_tokens=2) is None
        for far in ({"prompt": "Question"}, {"logit_bias": {"65000": 1}}, {"stop_token_ids": [65_000]}):
            refused = answered("chat", "/completions", **{"prompt": "question", **far})
            assert refused is not None and "token 65000, which this model has no embedding for" in refused
            assert "prompt" not in far or "'Q', token 65000" in refused
        for model in ("embed", "gemma"):
            assert embedded("mill", model) is None and embedded([5, 6], model) is None
        for token in (140, 10**6, 2**40):
            refused = embedded([1, token], "gemma")
            assert refused is not None and f"token {token}, which" in refused and "ids are 0 to 139" in refused
            assert "check_embedding_ctx_length=False" in refused
        refused = embedded(["mill", "the bakery"])
        assert refused == (
            "input 1 has 'bakery', token 65000, which this model has no embedding for: its token ids are 0 to 219."
        )
        assert answered("rank", "/rerank", query="mill", documents=["stream"]) is None
        for query, document in (("mill", "bakery"), ("bakery", "mill")):
            refused = answered("rank", "/rerank", query=query, documents=["stream", document])
            assert refused is not None and "'bakery', token 65000" in refused
        assert transcribed("question") is None
        refused = transcribed("Question")
        assert refused is not None and "the prompt has 'Q', token 65000" in refused
        assert answered("voice", "/audio/speech", voice="af_bella", input="/mil/") is None
        refused = answered("voice", "/audio/speech", voice="af_bella", input="/milz/")
        assert refused is not None and "the text has token 65000" in refused
