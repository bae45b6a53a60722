"""An engine of a kind over a link, shared by the tests of a module. Modules that use it choose their kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import Driver, engine
from support.kinds import LINKS, Kind, kind_of
from support.processes import children_find_us


@pytest.fixture(scope="module", params=["fake", "mlx"])
def kind(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Kind:
    return kind_of(request.param, tiny_model)


@pytest.fixture(scope="module", params=list(LINKS))
def link(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Child processes must be able to import the backends of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        children_find_us(patch)
        yield LINKS[request.param]


@pytest.fixture(scope="module")
def shared(kind: Kind, link: Any) -> Iterator[Driver]:
    with engine(kind.backend, kind=link, make_scheduler=kind.scheduler) as running:
        yield running


@pytest.fixture
def driver(shared: Driver) -> Driver:
    shared.reset()
    return shared
