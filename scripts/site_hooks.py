"""Brings the repository's own pages, CONTRIBUTING.md and CHANGELOG.md, into the documentation site.

They stand at the root, where forges look for them. Links between them and docs/ are turned into links of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, target in PAGES.items():
        text = LINK.sub(_inside, (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Pages of docs/ that link to ../CHANGELOG.md and the like."""
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    return markdown


def _inside(link: re.Match[str]) -> str:
    """A link of a page at the root, as the site has it."""
    target = link[2].removeprefix("docs/")
    return link[1] + PAGES.get(target, target)
