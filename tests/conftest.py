"""What every test may use. Before MLX is imported anywhere, a real BLAS is loaded, as the server does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from millstream.backend.environment import load_blas

load_blas()

# How long an example takes says something of the machine, not of the code.
_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="long tests at their full length: some minutes more")


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether long tests run at their full length."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny random model of a family, made once a run."""
    from support.tiny import write_model

    root = tmp_path_factory.mktemp("tiny-models")

    def get(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else write_model(folder, family)

    return get
