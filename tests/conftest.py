"""Options and fixtures of all tests. Loads a BLAS before anything imports MLX, as the server does.

The suite has two tiers (see support/tiers.py): tests marked `whole` are deselected unless `--whole` is given, or a test
is named by its node id.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from httpx._transports import default as httpx_transport

from millstream.backend.environment import load_blas
from millstream.backend.kernels.cpu_kernels import keep_cpu_kernels
from support import tiers

CACHE = Path(__file__).parent.parent / ".pytest_cache"
tempfile.gettempdir()  # the tests' own files stay there
os.environ.update(keep_cpu_kernels(CACHE / "kernels"))  # workers and engine processes inherit it

# On a GPU, MLX rounds the factors of a matmul in float32 to 10 bits, unless it is told before its first one. Tests
# compare numbers. Engine processes inherit it.
os.environ["MLX_ENABLE_TF32"] = "0"

os.environ["PYTHONFAULTHANDLER"] = "1"  # an engine's process that crashes or hangs says where

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores

# The configuration of whoever runs the tests must not reach the servers under test.
os.environ["XDG_CONFIG_HOME"] = str(CACHE / "no-config")
for variable in ("MILLSTREAM_CONFIG", "MILLSTREAM_MODELS", "MILLSTREAM_API_KEY"):
    os.environ.pop(variable, None)

load_blas()

pytest_plugins = [
    "support.demo",
    "support.encoder_server",
    "support.real_encoders",
    "support.real_kokoro",
    "support.speech_server",
]

# `httpx.get` makes a client each time, and each reads the certificates of all authorities: 80 ms of CPU time a request.
httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)

# How long an example takes says something of the machine, not of the code.
_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("untimed")

_LEFT = pytest.StashKey[int]()
"""How many tests were left to `--whole`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every test at its full length, not one of each kind")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT] = 0
    tiers.run_whole(config.getoption("--whole"))


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """pytest-rerunfailures tells the main process of each test with two small packets: without this the second waits
    40 ms until the first is acknowledged: 3.5 of 23 minutes."""
    reports = getattr(session.config, "failures_db", None)
    if isinstance(connection := getattr(reports, "sock", None), socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    root = f"{config.rootpath}{os.sep}"
    named = [argument.removeprefix(root) for argument in config.args if "::" in argument]
    left = [
        item
        for item in items
        if item.get_closest_marker("whole") and not any(item.nodeid.startswith(name) for name in named)
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        config.stash[_LEFT] = len(left)
        out = set(left)
        items[:] = [item for item in items if item not in out]


def pytest_collection_finish() -> None:
    """Keep modules and tests away from the garbage collector, for good. An engine that closes would unfreeze and visit
    them: 0.3 s each time, of some hundred engines."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash[_LEFT]:
        terminalreporter.write_line(f"{left} tests are left to --whole")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A worker of xdist has ended. All of them collect the same tests."""
    output = getattr(node, "workeroutput", {})
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    config.stash[_LEFT] = max(config.stash[_LEFT], output.get("left", 0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left"] = session.config.stash[_LEFT]


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether long tests run at their full length."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny random model of a family, made once a run."""
    from support import tiny_encoders, tiny_kokoro
    from support.tiny import write_model
    from support.tiny_whisper import write_whisper

    root = tmp_path_factory.mktemp("tiny-models")

    def get(family: str) -> Path:
        folder = root / family
        if family == "whisper":
            return folder if folder.exists() else write_whisper(folder)
        if family == "kokoro":
            return folder if folder.exists() else tiny_kokoro.write_kokoro(folder)
        write = tiny_encoders.write_encoder if family in tiny_encoders.OWN else write_model
        return folder if folder.exists() else write(folder, family)

    return get
