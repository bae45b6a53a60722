"""Sealed text, and the key file of --store-dir."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream.errors import ModelError
from millstream.service.store.directory import KEY_FILE, prepare, seal_key
from millstream.service.store.seal import KEY_BYTES, SecretKeySeal


def test_only_the_same_key_opens() -> None:
    one, two = SecretKeySeal(), SecretKeySeal()
    sealed = one.seal("reasoning, größer")
    assert one.open(sealed) == "reasoning, größer"
    assert two.open(sealed) is None
    assert one.seal("a") != one.seal("a")
    other = "A" if sealed[0] != "A" else "B"
    for changed in (sealed[:-4], other + sealed[1:], sealed + "!", "", "AAAA", "größe"):
        assert one.open(changed) is None


def test_a_restart_finds_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "store"
    records = prepare(folder)
    sealed = SecretKeySeal(seal_key(folder)).seal("text")
    assert SecretKeySeal(seal_key(folder)).open(sealed) == "text"
    assert prepare(folder) == records == folder / "records"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"store": 0o700, "records": 0o700, KEY_FILE: 0o600}


def test_servers_that_start_at_once_get_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(seal_key, [tmp_path] * 32))) == 1
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_a_key_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server creates its key between our look and our write."""
    monkeypatch.setattr(Path, "exists", lambda *_, **__: False)
    assert seal_key(tmp_path) == seal_key(tmp_path)


@pytest.mark.parametrize("size", [0, KEY_BYTES - 1, KEY_BYTES + 1, 1000])
def test_a_file_that_is_no_key_is_an_error_of_the_start(tmp_path: Path, size: int) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"x" * size)
    with pytest.raises(ModelError, match=r"seal\.key is not a key: it must have 32 bytes.*remove it"):
        seal_key(tmp_path)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match=r"cannot use --store-dir .*file: (Not a directory|File exists)"):
        prepare(tmp_path / "file")
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(ModelError, match=r"cannot use the key in .*seal\.key: Is a directory"):
        seal_key(tmp_path)


def test_a_key_that_others_may_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"k" * KEY_BYTES)
    (tmp_path / KEY_FILE).chmod(0o644)
    assert seal_key(tmp_path) == b"k" * KEY_BYTES
    assert "chmod 600" in caplog.text
