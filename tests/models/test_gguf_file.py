"""Opening GGUF files, and the errors for damaged ones."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import ModelError
from millstream.models.gguf_file import open_gguf
from support.tiers import examples


def write(path: Path) -> bytes:
    """A small file with every kind of metadata value and three tensor types. Returns its bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(10000.0)
    writer.add_bool("flag", True)
    writer.add_int64("negative", -5)
    writer.add_string("text", "Grüße")
    writer.add_array("words", ["a", "", "▁b"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("fractions", [0.5, 1.5])
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("floats", values)
    writer.add_tensor("halves", values.astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blocks", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write(path)
    return path


def test_metadata_are_plain_values(sample: Path) -> None:
    file = open_gguf(sample)
    assert file.architecture == "llama"
    assert file.hyper("block_count") == 3
    assert file.hyper("missing", 7) == 7
    expected = {
        "flag": True,
        "negative": -5,
        "text": "Grüße",
        "words": ["a", "", "▁b"],
        "numbers": [1, -2, 3],
        "fractions": [0.5, 1.5],
    }
    found = {key: file.metadata[key] for key in expected}
    assert found == expected
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in expected.items()}


def test_tensors_have_their_shape_type_and_values(sample: Path) -> None:
    tensors = open_gguf(sample).tensors
    assert {name: (tensor.kind, tensor.shape) for name, tensor in tensors.items()} == {
        "floats": ("F32", (2, 32)),
        "halves": ("F16", (2, 32)),
        "blocks": ("Q8_0", (2, 32)),
    }
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    assert np.array_equal(tensors["floats"].data, values)
    assert np.array_equal(tensors["halves"].floats(), values)
    assert np.allclose(tensors["blocks"].floats(), values, atol=0.3)
    assert tensors["blocks"].data.shape == (2, 34)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00", "version 1"),
        (b"GGUF\x00\x00\x00\x03", "big-endian"),
        (b"GGUF\x03\x00", "truncated"),
    ],
)
def test_the_error_says_what_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        open_gguf(path)
    assert str(path) in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: cannot be opened"):
        open_gguf(tmp_path / "nowhere.gguf")


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 parts"):
        open_gguf(path)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_truncated_file(sample: Path, data: st.DataObject) -> None:
    content = sample.read_bytes()
    end = data.draw(st.integers(8, len(content) - 32))
    path = sample.with_name("truncated.gguf")
    path.write_bytes(content[:end])
    with pytest.raises(ModelError, match="truncated"):
        open_gguf(path)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_damaged_header_opens_or_is_refused_and_never_crashes(sample: Path, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, 600))] = data.draw(st.integers(0, 255))
    path = sample.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        open_gguf(path)
    except ModelError as error:
        assert str(path) in error.message
