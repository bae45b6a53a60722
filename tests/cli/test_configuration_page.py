"""docs/configuration.md has the options that the code has. UPDATE_DOCS=1 writes its tables anew."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest

from millstream.cli import serve
from millstream.cli.settings import resolve_config
from millstream.config import Settings
from support.option_tables import tables

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize("name", tables())
def test_the_tables_of_the_page_are_those_of_the_code(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: made from the code -->\n\n", f"\n\n<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    written, closed, after = rest.partition(end)
    assert found and closed, f"the page has no place for {name}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(before + begin + tables()[name] + end + after, encoding="utf-8")
    else:
        assert written == tables()[name], f"run UPDATE_DOCS=1 pytest {Path(__file__).name}"


def test_the_examples_of_the_page_can_be_read(tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    file = tmp_path / "mill.toml"
    for example in examples:
        file.write_text(example, encoding="utf-8")
        assert resolve_config(parser.parse_args(["serve", "--config", str(file)]), {}).settings != Settings()
