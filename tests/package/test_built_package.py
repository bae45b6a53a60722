"""What is in the wheel and the sdist, and that building them again gives the same bytes."""

from __future__ import annotations

import email
import hashlib
import os
import re
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import millstream
from support.package_building import REPOSITORY, Built, build, copy_of_the_repository

SOURCE = REPOSITORY / "src" / "millstream"
HOME = "https://github.com/millstream/millstream"


@pytest.fixture(scope="module")
def metadata(built: Built) -> Message:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(wheel.read(name).decode())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_copy_of_the_sources_gives_the_same_bytes(built: Built, tmp_path: Path) -> None:
    source = copy_of_the_repository(tmp_path / "copy")
    for path in source.rglob("*"):
        os.utime(path, (1, 1))
    again = build(source, tmp_path / "out")
    assert digest(again.wheel) == digest(built.wheel)
    assert digest(again.sdist) == digest(built.sdist)


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    here = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    assert names == {name for name in here if "__pycache__" not in name}
    assert "millstream/py.typed" in names


def test_the_sdist_can_be_built_and_tested(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {"src/millstream/__init__.py", "tests/conftest.py", "docs/architecture.md"} <= names


def test_the_metadata_says_what_it_is(metadata: Message) -> None:
    assert metadata["Version"] == millstream.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    urls = dict(str(line).split(", ") for line in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= set(urls)
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_description_has_whole_addresses(metadata: Message) -> None:
    """A package index shows it without the repository around it."""
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    assert f"{HOME}/blob/v{millstream.__version__}/docs/quickstart.md" in links
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_one_build_of_mlx_per_extra_and_none_without(metadata: Message) -> None:
    """MLX's packages for CPU and CUDA own the same file: whoever asks for one must not get another."""
    needs = [Requirement(str(line)) for line in metadata.get_all("Requires-Dist", [])]

    def builds(extra: str, system: str = "linux") -> set[str]:
        machine = {"sys_platform": system, "platform_machine": "x86_64", "extra": extra}
        return {
            ",".join(sorted(need.extras)) or "plain"
            for need in needs
            if need.name == "mlx" and (need.marker is None or need.marker.evaluate(machine))
        }

    assert builds("") == set()
    assert {extra: builds(extra) for extra in ("cpu", "cuda", "cuda12")} == {
        "cpu": {"cpu"}, "cuda": {"cuda13"}, "cuda12": {"cuda12"},
    }  # fmt: skip
    assert builds("", "darwin") == {"plain"}
    assert not [need for need in needs if need.name == "mlx-vlm"], (
        "it would bring 15 packages that serving does not need"
    )
