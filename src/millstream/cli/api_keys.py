"""The API keys that the server accepts: checked, and read from a file where one is named. Errors never show a key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.errors import ModelError

KEY_OPTIONS = ("api_keys", "api_key", "api_key_file")


def collect_keys(values: Mapping[str, Any], where: Mapping[str, str]) -> tuple[str, ...]:
    """`values` are those of one place, and `where` says for each option where it is set."""
    keys = [_checked(key, where["api_keys"]) for key in values.get("api_keys", ())]
    if "api_key" in values:
        keys.append(_checked(values["api_key"], where["api_key"]))
    if "api_key_file" in values:
        keys += _keys_in(values["api_key_file"].expanduser())
    return tuple(dict.fromkeys(keys))


def _keys_in(file: Path) -> list[str]:
    """One key per line. Blank lines and lines that start with # are ignored."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except OSError as error:
        raise ModelError(f"cannot read the API keys in {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"cannot read the API keys in {file}: it is not UTF-8 text") from error
    keys = [_checked(line, str(file)) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ModelError(f"{file} has no API key: write one per line")
    return keys


def _checked(key: str, where: str) -> str:
    """The key without surrounding whitespace, which a header cannot carry."""
    key = key.strip()
    if not key:
        raise ModelError(f"{where}: the API key is empty. Set a key, or leave the option out to serve without keys")
    if " " in key or not key.isprintable():
        raise ModelError(f"{where}: an API key contains a space or a character that is not printable")
    return key
