"""Joins the documentation site with the repository around docs/.

CONTRIBUTING.md and CHANGELOG.md stand at the root, where forges look for them, and are pages of the site too. Links to
other files outside docs/, such as examples, lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"^```.*?^```|`[^`\n]+`|(\]\()(?!https?:|mailto:|#)([^)#\s]+)", re.MULTILINE | re.DOTALL)
"""A link, or code, in which nothing is one."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    generated = here in PAGES.values()
    folder = "" if generated else posixpath.join("docs", posixpath.dirname(here))

    def linked(link: re.Match[str]) -> str:
        """The link as the site has it: `target` is a path from the repository's root."""
        if link[2] is None:
            return link[0]
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            inside = target.removeprefix("docs/")
            return link[1] + (inside if generated else link[2])
        if target in PAGES:
            return link[1] + posixpath.relpath(PAGES[target], posixpath.dirname(here) or ".")
        if not (ROOT / target).exists():
            raise PluginError(f"{here} links to {link[2]}, which is not there")
        return f"{link[1]}{config.extra['repository']}/blob/main/{target}"

    return LINK.sub(linked, markdown)
