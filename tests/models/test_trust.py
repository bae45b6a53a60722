"""Nothing from a model folder is executed: references to code are refused or not followed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ModelError
from millstream.models.checks import check_folder
from millstream.models.source import ModelSource
from millstream.models.trust import copy_tokenizer_data
from millstream.text.loading import load_tokenizer
from support.tiny import write_servable

SHAPES = Path(__file__).parent.parent / "assets" / "shapes-vlm"
AUTO_MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModel": "own.OwnModel",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoTokenizer": [None, "own.OwnTokenizer"],
    "AutoProcessor": "own.OwnProcessor",
    "AutoImageProcessor": "own.OwnProcessor",
}


def write_own(folder: Path) -> Path:
    """Python files that create a marker file if they run. Returns the path of the marker."""
    marker = folder.parent / "it-was-run"
    source = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    for name in ("own", "modeling", "tokenization", "processing", "numpy", "mlx", "mlx_lm", "transformers"):
        (folder / f"{name}.py").write_text(source)
    return marker


def change(path: Path, **values: Any) -> None:
    whole = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(whole | values))


def load_weights(folder: Path) -> None:
    from millstream.backend.device import current_device, use_device
    from millstream.backend.weights.loading import load

    use_device("cpu")
    load("folder", folder, current_device(), unpack=True)


@pytest.mark.parametrize("section", ["config", "text_config"])
@pytest.mark.parametrize("kind", ["vision", "text"])
def test_model_file_is_refused_by_name_by_the_server_and_by_the_loader(tmp_path: Path, kind: str, section: str) -> None:
    folder = tmp_path / "model"
    if kind == "vision":
        shutil.copytree(SHAPES, folder)
    else:
        write_servable(folder)
    marker = write_own(folder)
    inside = json.loads((folder / "config.json").read_text()).get("text_config", {}) | {"model_file": "own.py"}
    change(folder / "config.json", **({"model_file": "own.py"} if section == "config" else {"text_config": inside}))
    for work in (check_folder, load_weights):
        with pytest.raises(ModelError, match=r"model_file is 'own\.py'.* never run"):
            work(folder)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["vision", "text"])
def test_auto_map_is_not_followed(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    if kind == "vision":
        shutil.copytree(SHAPES, folder)
    else:
        write_servable(folder)
    marker = write_own(folder)
    for name in ("config", "tokenizer_config", "processor_config", "preprocessor_config"):
        change(folder / f"{name}.json", auto_map=AUTO_MAP)
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    check_folder(folder)
    load_tokenizer(ModelSource("own", "folder", folder))
    load_weights(folder)
    assert not marker.exists()


def write_sentencepiece(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the mill stands by the stream", "and the stream turns the mill"] * 5),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )


@pytest.mark.parametrize("named", ["OwnTokenizer", "LlamaTokenizer", "AutoModelForCausalLM", "pipeline", 7])
def test_transformers_builds_a_tokenizer_from_data_alone(tmp_path: Path, named: object) -> None:
    folder = tmp_path / "model"
    write_sentencepiece(folder)
    marker = write_own(folder)
    change(folder / "config.json", model_type="llama", auto_map=AUTO_MAP)
    change(folder / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class=named, vocab_file="/etc/passwd")
    tokenizer = load_tokenizer(ModelSource("own", "folder", folder))
    assert tokenizer.decode(tokenizer.encode("the mill")).strip() == "the mill"
    assert not marker.exists()


def test_a_library_gets_no_code_no_pickles_and_no_references_to_them(tmp_path: Path) -> None:
    folder, copy = tmp_path / "model", tmp_path / "copy"
    copy.mkdir()
    folder.mkdir()
    write_own(folder)
    for name in ("vocab.json", "merges.txt", "spiece.model", "pytorch_model.bin", "vocab.pkl", "model.pt", "notes.txt"):
        (folder / name).write_text("{}")
    change(
        folder / "tokenizer_config.json", auto_map=AUTO_MAP, extra={"auto_map": AUTO_MAP}, vocab_file="/x", unk="<u>"
    )
    copy_tokenizer_data(folder, copy)
    assert {path.name for path in copy.iterdir()} == {
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "tokenizer_config.json",
    }
    assert json.loads((copy / "tokenizer_config.json").read_text()) == {"extra": {}, "unk": "<u>"}


@pytest.mark.parametrize("value", [{"manifest": "/etc/passwd"}, {"manifest": "own.json"}])
def test_references_to_other_weight_files_are_refused(tmp_path: Path, value: object) -> None:
    folder = write_servable(tmp_path / "model")
    change(folder / "config.json", text_config={"ple_storage": value})
    with pytest.raises(ModelError, match="ple_storage is not supported"):
        check_folder(folder)


def test_a_config_that_mlx_vlm_takes_for_another_family_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(SHAPES, tmp_path / "model")
    change(folder / "config.json", architectures=["DFlash2DraftModel"])
    with pytest.raises(ModelError, match="takes this for a 'dflash2'"):
        load_weights(folder)
