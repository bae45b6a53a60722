"""docs/troubleshooting.md quotes messages of the code: they are what the code says today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import millstream

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
OTHERS = ("command not found", "libmlx.so:", "pip", "mlx", "cpu", "cached_tokens", "finish_reason", "length")
"""Messages and words of other programs, and of clients."""


def messages() -> list[str]:
    """What stands in backquotes in the first column."""
    rows = re.findall(r"^\| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    return [text for text in quoted if not text.endswith(OTHERS) and not text.startswith(OTHERS)]


def source() -> str:
    """All code, with string literals that follow each other joined, and fields of f-strings as an ellipsis."""
    texts = [path.read_text(encoding="utf-8") for path in Path(millstream.__file__).parent.rglob("*.py")]
    joined = re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(texts))
    return re.sub(r"\{[^{}\n]*\}|%[sd]", "…", joined)


@pytest.fixture(scope="module")
def code() -> str:
    return source()


@pytest.mark.parametrize("message", messages())
def test_a_message_is_in_the_code(code: str, message: str) -> None:
    fixed = re.split(r"…|NAME|for CPUs|127\.0\.0\.1|8000|config\.json|Address already in use", message)
    for part in (part.strip(" .:") for part in fixed):
        assert part in code, f"no message has {part!r}"


def test_the_page_quotes_enough() -> None:
    assert len(messages()) > 20
