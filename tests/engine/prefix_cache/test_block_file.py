"""Block files: in the safetensors format, and validated before they are used."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.prefix_cache.block_hash import root_hash
from millstream.engine.prefix_cache.disk.block_file import DamagedFile, StoredRun, pack, read_header, unpack
from millstream.engine.prefix_cache.disk.block_header import DTYPES
from millstream.types import Tensor
from support.runs import STAMP, seeded_run
from support.tiers import examples

ROOT = root_hash(STAMP)
ONE = seeded_run(3, size=64)
words = st.text('aB0 "\\/\n\0é漢🜚', max_size=9)


@st.composite
def runs(draw: st.DrawFn) -> StoredRun:
    tokens = tuple(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20)))
    tensors = []
    for name in draw(st.lists(words, max_size=3, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        size = DTYPES[dtype][1]
        for axis in shape:
            size *= axis
        tensors.append((name, Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))))
    media = st.tuples(st.integers(0, len(tokens) - 1), words)
    contents = tuple(draw(st.lists(media, max_size=3)))
    return StoredRun(ROOT, draw(st.integers(1, 8)), tokens, contents, tuple(tensors), draw(words))


@settings(deadline=None)
@given(runs(), words)
def test_a_run_survives_pack_and_unpack(run: StoredRun, stamp: str) -> None:
    buffers = pack(run, stamp)
    assert unpack(b"".join(buffers), stamp) == run
    assert all(buffer is tensor.data for buffer, (_, tensor) in zip(buffers[1:], run.tensors, strict=True)), "copied"


def test_other_programs_can_read_it(tmp_path: Path) -> None:
    import numpy as np
    from safetensors import safe_open

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    codes = np.array([1, 2**32 - 1], dtype=np.uint32)
    half = b"\x80\x3f" * 3  # 1.0 in bfloat16
    run = replace(
        ONE,
        tensors=(
            ("values", Tensor("float32", (2, 3), values.tobytes())),
            ("half", Tensor("bfloat16", (3,), half)),
            ("codes", Tensor("uint32", (2,), codes.tobytes())),
            ("none", Tensor("int32", (0, 4), b"")),
        ),
        extra='{"kind": "ünïcode"}',
    )
    path = tmp_path / "run.safetensors"
    path.write_bytes(b"".join(pack(run, STAMP)))
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {"values", "half", "codes", "none"}
        assert (file.get_tensor("values") == values).all()
        assert (file.get_tensor("codes") == codes).all()
        assert file.get_tensor("none").shape == (0, 4)
        assert file.get_slice("half").get_dtype() == "BF16"
    assert json.loads(metadata["tokens"]) == list(run.tokens)
    assert (metadata["stamp"], metadata["extra"]) == (STAMP, run.extra)


def test_a_header_can_be_read_without_the_data(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(b"".join(pack(ONE, STAMP)))
    header = read_header(path)
    assert header == ONE.header(STAMP)
    assert header.keys == ONE.keys and len(header.keys) == 3


def test_a_short_last_block_has_a_hash() -> None:
    whole = seeded_run(1, tokens=8)
    longer = replace(whole, tokens=(*whole.tokens, 7))
    assert longer.keys[:2] == whole.keys
    assert len(longer.keys) == 3
    assert unpack(b"".join(pack(longer, STAMP)), STAMP) == longer


def test_a_flipped_bit_is_detected(tmp_path: Path) -> None:
    data = b"".join(pack(ONE, STAMP))
    path = tmp_path / "run"
    for offset in range(len(data)):
        damaged = data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :]
        with pytest.raises(DamagedFile):
            unpack(damaged, STAMP)
        # A scan reads headers only. It may accept a damaged file, but then the hashes still match the tokens.
        path.write_bytes(damaged)
        try:
            header = read_header(path)
        except DamagedFile:
            continue
        assert (header.tokens, header.contents, header.keys) == (ONE.tokens, ONE.contents, ONE.keys)


def test_a_truncated_file_is_detected(tmp_path: Path) -> None:
    data = b"".join(pack(ONE, STAMP))
    path = tmp_path / "run"
    for end in range(len(data)):
        with pytest.raises(DamagedFile):
            unpack(data[:end], STAMP)
        path.write_bytes(data[:end])
        with pytest.raises(DamagedFile):
            read_header(path)
    with pytest.raises(DamagedFile):
        unpack(data + b"\0", STAMP)


def test_a_file_of_another_model_is_refused() -> None:
    with pytest.raises(DamagedFile, match="another model"):
        unpack(b"".join(pack(ONE, STAMP)), STAMP + " adapter=x")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_damaged_file(data: bytes) -> None:
    with pytest.raises(DamagedFile):
        unpack(data, STAMP)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("stamp", "parent", "end", "block", "tokens", "contents", "extra")


@settings(max_examples=examples(200), deadline=None)
@given(field=st.sampled_from([*FIELDS, "dtype", "shape", "data_offsets"]), value=json_values, as_text=st.booleans())
def test_headers_that_lie_are_refused_in_one_way(
    field: str, value: object, as_text: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A correct checksum would not help: every field is validated before it is used."""
    head = pack(ONE, STAMP)[0]
    document = json.loads(head[8:])
    fields = document["__metadata__"] if field in FIELDS else document["layers.0.keys"]
    fields[field] = json.dumps(value) if as_text else value
    path = tmp_path_factory.getbasetemp() / "invalid"
    text = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    try:
        header = read_header(path)
    except DamagedFile:
        return
    assert field in ("stamp", "extra", "contents", "dtype", "shape"), "an invalid field was accepted"
    assert header.keys == ONE.keys
    assert header.data_bytes == 64


@pytest.mark.parametrize("text", ["[" * 100_000, '{"__metadata__":{"digest":"' + '","a":' + "[" * 100_000, "{}", "7"])
def test_deeply_nested_and_empty_headers_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deep"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    with pytest.raises(DamagedFile):
        read_header(path)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(struct.pack("<Q", 1 << 40))
    os.truncate(path, 1 << 41)  # a sparse file
    with pytest.raises(DamagedFile, match="length"):
        read_header(path)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"".join(pack(ONE, STAMP)))
    for name in ("pipe", "folder"):
        with pytest.raises(DamagedFile, match="regular"):
            read_header(tmp_path / name)
    with pytest.raises(OSError):
        read_header(tmp_path / "link")


@pytest.mark.parametrize(
    "change",
    [
        {"parent": "xyz"},
        {"parent": ROOT.upper()},
        {"tokens": ()},
        {"tokens": (2**31,)},
        {"block": 0},
        {"contents": ((12, "cat"),)},
        {"contents": ((-1, "cat"),)},
        {"tensors": (("a", Tensor("float32", (2,), b"1234")),)},
        {"tensors": (("a", Tensor("complex64", (1,), b"12345678")),)},
        {"tensors": (("a", Tensor("int8", (1,), b"1")), ("a", Tensor("int8", (1,), b"1")))},
        {"tensors": (("__metadata__", Tensor("int8", (1,), b"1")),)},
    ],
)
def test_a_run_that_could_not_be_read_back_raises(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(ONE, **change)  # type: ignore[arg-type]
