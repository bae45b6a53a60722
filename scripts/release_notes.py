"""Prints the changelog's section of a version. Fails if the tag, the package's version and the changelog disagree.

python scripts/release_notes.py v1.2.3
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def package_version(root: Path = ROOT) -> str:
    found = re.search(r'^__version__ = "([^"]+)"$', (root / "src/millstream/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("src/millstream/__init__.py has no __version__")
    return found[1]


def section(changelog: str, version: str) -> str:
    """The text below `## VERSION (date)`, up to the next version."""
    start = re.search(rf"^## {re.escape(version)} \((.*)\)$", changelog, re.MULTILINE)
    if start is None:
        raise SystemExit(f"CHANGELOG.md has no section '## {version} (date)'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", start[1]):
        raise SystemExit(f"CHANGELOG.md says '{start[1]}' where the date of {version} should be")
    return re.split(r"^## ", changelog[start.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1].startswith("v"):
        raise SystemExit(__doc__)
    version = sys.argv[1].removeprefix("v")
    if version != package_version():
        raise SystemExit(f"the tag is v{version}, but the package's version is {package_version()}")
    print(section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))


if __name__ == "__main__":
    main()
