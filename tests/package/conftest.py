"""The wheel and the sdist, built once."""

from __future__ import annotations

import pytest

from support.package_building import REPOSITORY, Built, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("build", reason="the extra dev is not installed")
    return build(REPOSITORY, tmp_path_factory.mktemp("built"))
