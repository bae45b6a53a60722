"""The documentation site builds without broken links and loads nothing from other hosts; links of README hold, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
LIMIT = 300


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("material", reason="the extra docs is not installed")
    return subprocess.run(
        # Not --quiet: it would not count warnings, and let broken links pass.
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    """A site of three pages, with the settings of ours."""
    settings = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "scripts").mkdir()
    hooks = (REPOSITORY / "scripts" / "site_hooks.py").read_text(encoding="utf-8")
    (tmp_path / "scripts" / "site_hooks.py").write_text(hooks)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/security.md", "docs/index.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Title\n\n[a link](https://example.com)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    for link in ("nowhere.md", "../nowhere.py", "security.md#nowhere"):
        (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n[a link]({link})\n")
        done = build(tmp_path, tmp_path / "site")
        assert done.returncode != 0, link
        assert "nowhere" in done.stderr + done.stdout


class Loaded(HTMLParser):
    """What a browser fetches for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        fetched = values.get("rel") in ("stylesheet", "icon", "preconnect", "preload", "modulepreload")
        if tag in ("script", "img", "iframe", "source", "video"):
            self.addresses.append(values.get("src") or "")
        elif tag == "link" and fetched:
            self.addresses.append(values.get("href") or "")


def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(REPOSITORY / "docs").with_suffix(".html") for path in (REPOSITORY / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages <= built
    assert {Path("contributing.html"), Path("changelog.html")} <= built


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        page = Loaded()
        page.feed(path.read_text(encoding="utf-8"))
        assert page.addresses, path
        assert not [address for address in page.addresses if re.match(r"(https?:)?//", address)], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("name", ROOT_PAGES)
def test_links_of_pages_at_the_root_lead_somewhere(name: str) -> None:
    page = REPOSITORY / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        target, _, anchor = link.partition("#")
        if re.match(r"https?:|mailto:", target):
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(path), f"{name} links to {link}"


def anchors(path: Path) -> set[str]:
    """The headings of a page, as forges name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
