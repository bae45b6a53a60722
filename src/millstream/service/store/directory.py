"""The folder of `--store-dir`: made at start, with the key that seals text. Errors here are errors of the start."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

from millstream.errors import ModelError
from millstream.service.store.seal import KEY_BYTES

log = logging.getLogger(__name__)

KEY_FILE = "seal.key"
RECORDS = "records"


def prepare(folder: Path) -> Path:
    """Creates the folder, for its owner alone, and the one of the records in it. Returns the latter. Raises
    `ModelError` if it cannot be written to."""
    records = folder / RECORDS
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        records.mkdir(mode=0o700, exist_ok=True)
        probe = records / f".{secrets.token_hex(8)}"
        probe.touch(mode=0o600, exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ModelError(f"cannot use --store-dir {folder}: {error.strerror or error}") from error
    return records


def seal_key(folder: Path) -> bytes:
    """The key in the folder. Creates one at the first start. Raises `ModelError` if the file is not a key."""
    file = folder / KEY_FILE
    try:
        if not file.exists():
            _create(file)
        return _read(file)
    except OSError as error:
        raise ModelError(f"cannot use the key in {file}: {error.strerror or error}") from error


def _create(file: Path) -> None:
    """A link, unlike a rename, does not replace the key of a server that starts at the same time."""
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as written:
            written.write(secrets.token_bytes(KEY_BYTES))
            written.flush()
            os.fsync(descriptor)
        os.link(temporary, file)
    except FileExistsError:
        log.debug("another server has created %s", file)
    finally:
        temporary.unlink()


def _read(file: Path) -> bytes:
    with open(file, "rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        key = opened.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise ModelError(
            f"{file} is not a key: it must have {KEY_BYTES} bytes. Restore it, or remove it to get a new one: then "
            "reasoning that clients hold from earlier responses cannot be read any more"
        )
    if stat.S_IMODE(mode) & 0o077:
        log.warning("%s may be read by other users of this machine: chmod 600 it", file)
    return key
