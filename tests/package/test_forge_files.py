"""Files for the forge: workflows and issue forms follow their schemas, and a release's notes are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
FORGE = REPOSITORY / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [FORGE / "ISSUE_TEMPLATE" / "config.yml"]),
    ],
)
def test_files_follow_their_schema(schema: str, files: list[Path]) -> None:
    pytest.importorskip("check_jsonschema", reason="the extra dev is not installed")
    assert files
    command = [sys.executable, "-P", "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def jobs() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in WORKFLOWS:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert document["permissions"] == {"contents": "read"}, f"{path.name}: only jobs may have more rights"
        found += [(f"{path.stem}.{name}", job) for name, job in document["jobs"].items()]
    return found


def test_jobs_end_and_run_what_is_there() -> None:
    targets = {line.split(":")[0] for line in (REPOSITORY / "Makefile").read_text().splitlines() if ":" in line}
    for name, job in jobs():
        assert job["timeout-minutes"] <= 360, name
        for step in job["steps"]:
            for line in str(step.get("run", "")).splitlines():
                words = line.split()
                if words[:1] == ["make"]:
                    assert {word for word in words[1:] if "=" not in word} <= targets, name
                assert all((REPOSITORY / word).exists() for word in words if word.startswith("scripts/")), name


def test_bug_reports_ask_for_the_doctor() -> None:
    form = yaml.safe_load((FORGE / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    (field,) = [item for item in form["body"] if item.get("id") == "doctor"]
    assert "millstream doctor" in field["attributes"]["label"] and field["validations"]["required"]


def notes(root: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "release_notes.py"), tag]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("tag", "heading", "problem"),
    [
        ("v1.2.3", "## 1.2.3 (2026-11-17)", ""),
        ("v1.2.4", "## 1.2.3 (2026-11-17)", "the package's version is 1.2.3"),
        ("v1.2.3", "## 1.2.3 (unreleased)", "where the date of 1.2.3 should be"),
        ("v1.2.3", "## 1.2.2 (2026-11-17)", "no section"),
    ],
)
def test_a_release_has_its_notes(tmp_path: Path, tag: str, heading: str, problem: str) -> None:
    for folder in ("scripts", "src/millstream"):
        (tmp_path / folder).mkdir(parents=True)
    script = (REPOSITORY / "scripts" / "release_notes.py").read_text(encoding="utf-8")
    (tmp_path / "scripts" / "release_notes.py").write_text(script)
    (tmp_path / "src" / "millstream" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- New.\n\n## 1.0.0 (2025-01-01)\n\n- Old.\n")
    done = notes(tmp_path, tag)
    assert (done.returncode == 0) == (not problem)
    assert problem in done.stderr
    assert done.stdout == ("" if problem else "- New.\n")
