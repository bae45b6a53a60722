"""The table of rooms and imports in docs/architecture.md, held against the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import millstream

ROOT = Path(millstream.__file__).parent
DOCS = ROOT.parent.parent / "docs"

LIBRARIES = {
    "http": {"starlette", "fastapi", "uvicorn"},
    "asyncio": {"asyncio", "uvloop", "anyio"},
    "threads": {"threading", "_thread", "multiprocessing", "queue"},
    "executors": {"concurrent"},
    "mlx": {"mlx", "mlx_lm", "mlx_vlm", "mlx_audio"},
    "mcp": {"mcp", "mcp_types", "httpx2"},
    "otel": {"opentelemetry"},
}

GROUND = {
    "types",
    "speech_types",
    "realtime_types",
    "model_facts",
    "parameters",
    "errors",
    "config",
    "deadline",
    "installed",
    "sandbox",
    "request_context",
    "logs",
    "exact_json",
    "__version__",
}
"""Modules that every room may import. They import none of ours but each other."""

ROOMS: dict[str, tuple[set[str], set[str]]] = {
    # room: (rooms that it may import, groups of libraries that it may import)
    "engine": (set(), {"threads"}),
    "engine.prefix_cache": (set(), {"threads"}),
    "engine.generation": ({"engine", "engine.prefix_cache"}, set()),
    "engine.jobs": ({"engine"}, set()),
    "engine.transcription": ({"engine"}, set()),
    "engine.speech": ({"engine"}, set()),
    "models": (set(), {"threads", "executors"}),
    "media": (set(), {"executors"}),
    "text": ({"models"}, set()),
    "backend": ({"engine", "models"}, {"mlx", "threads"}),
    "backend.generation": ({"backend", "engine", "engine.generation", "engine.prefix_cache"}, {"mlx"}),
    "backend.encoders": ({"backend", "engine", "engine.jobs", "models"}, {"mlx"}),
    "backend.transcription": ({"backend", "engine", "engine.transcription", "models"}, {"mlx"}),
    "backend.speech": ({"backend", "engine", "engine.speech", "models"}, {"mlx"}),
    "service": ({"engine"}, {"asyncio"}),
    "service.media": ({"media"}, {"asyncio", "executors"}),
    "service.generation": (
        {"service", "service.media", "engine", "engine.generation", "text", "media"},
        {"asyncio", "executors"},
    ),
    "service.encoding": ({"service", "engine", "engine.jobs", "text"}, {"asyncio", "executors"}),
    "service.transcription": (
        {"service", "service.media", "engine", "engine.transcription", "media"},
        {"asyncio", "executors"},
    ),
    "service.realtime": ({"service", "media"}, {"asyncio"}),
    "service.speech": ({"service", "engine", "engine.speech", "text"}, {"asyncio", "executors"}),
    "service.mcp": ({"service"}, {"asyncio", "mcp"}),
    "service.telemetry": ({"service"}, {"asyncio", "threads", "otel"}),
    "service.store": (set(), {"asyncio", "executors"}),
    "api": ({"service", "text"}, {"http", "asyncio"}),
    "api.http1": ({"api"}, {"http", "asyncio"}),
    "api.pages": ({"api"}, {"http"}),
    "api.openai": ({"api", "service", "text", "media"}, {"http", "asyncio"}),
    "api.anthropic": ({"api", "service"}, {"http"}),
    "api.ollama": ({"api", "service"}, {"http"}),
    "loading": (set(), {"asyncio", "executors"}),
    "bench": (set(), {"asyncio"}),
}
"""From the ground up: a room imports only rooms that stand before it."""

ROOMS["loading"] = (
    {room for room in ROOMS if room.split(".")[0] not in ("api", "bench", "loading")},
    ROOMS["loading"][1],
)

JOINERS = {
    "cli",
    "compose.py",
    "last_resort.py",
    "pools.py",
    "server.py",
    "reload.py",
    "__main__.py",
    "__init__.py",
    "api/app.py",
}
"""They put rooms together, so they may import any."""


def room_of(module: str) -> str | None:
    """`millstream.engine.generation.plan` as `engine.generation`; None for what is not ours."""
    parts = module.split(".")
    if parts[0] != "millstream" or len(parts) < 2:
        return None
    inner = ".".join(parts[1:3])
    return inner if inner in ROOMS else parts[1]


def files(room: str) -> list[Path]:
    """A room's modules, without those of rooms inside it."""
    folder = ROOT.joinpath(*room.split("."))
    found = [path for path in sorted(folder.rglob("*.py")) if path.relative_to(ROOT).as_posix() not in JOINERS]
    return [path for path in found if room_of(module_of(path)) == room]


def module_of(path: Path) -> str:
    parts = ("millstream", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which floor they reach"
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_line_in_the_table_says(room: str) -> None:
    rooms, groups = ROOMS[room]
    allowed = {room, *rooms, *GROUND}
    banned = set().union(*(names for group, names in LIBRARIES.items() if group not in groups))
    assert files(room), f"{room} is empty"
    for path in files(room):
        for name in imports(path):
            assert name.split(".")[0] not in banned, f"{path.relative_to(ROOT)} imports {name}"
            other = room_of(name)
            assert other is None or other in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_no_room_imports_upwards() -> None:
    """The table is in order: a room stands above all that it imports, so there are no circles of rooms."""
    below: set[str] = set()
    for room, (rooms, _) in ROOMS.items():
        assert rooms <= below, f"{room} imports {rooms - below}, which stand above it"
        below.add(room)


def test_the_table_of_the_docs_is_this_one() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([a-z0-9_/]+)/` \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    told: dict[str, tuple[set[str], set[str]]] = {}
    for name, rooms, groups in lines:
        listed = _names(rooms.removeprefix("all above but "))
        told[name.replace("/", ".")] = (set(told) - listed if rooms.startswith("all above") else listed, _names(groups))
    assert told == ROOMS


def _names(cell: str) -> set[str]:
    return {name.strip().replace("/", ".") for name in cell.split(",")} - {"-"}


def test_futures_are_only_waited_for_where_blocking_is_allowed() -> None:
    """`service/` may hand work to a pool, but never blocks on its result: the event loop runs there."""
    for room in [room for room in ROOMS if room.startswith(("service", "api"))]:
        for path in files(room):
            source = path.read_text(encoding="utf-8")
            assert "futures.wait" not in source and "as_completed" not in source
            for node in ast.walk(ast.parse(source)):
                blocks = (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "result"
                )
                assert not (blocks and (node.args or node.keywords)), f"{path.relative_to(ROOT)} waits for a future"  # type: ignore[union-attr]


def test_api_knows_the_service_by_its_protocols_alone() -> None:
    for path in (ROOT / "api").rglob("*.py"):
        for name in imports(path):
            if name.startswith("millstream.service"):
                assert name.startswith("millstream.service.ports"), f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_engine_client_opens_inboxes() -> None:
    """So that none stays open where a request is refused, whatever its kind: it would count as unread for ever."""
    users = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if re.search(r"\bInbox\(", path.read_text())
    }
    assert users == {"service/engine_client.py"}


def test_the_ground_stands_on_nothing() -> None:
    for name in GROUND - {"__version__"}:
        rooms = {room_of(item) for item in imports(ROOT / f"{name}.py")} - {None}
        assert rooms <= GROUND, f"{name}.py imports {rooms}"


def test_the_decoder_of_videos_is_imported_by_its_child_alone() -> None:
    """FFmpeg reads what strangers wrote: not in the server's process."""
    users = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "av" in imports(path)}
    # The encoder of speech gets samples that a model of ours made, and parses nothing.
    encoder = "media/compressed_encoding.py"
    assert users == {"media/container.py", "media/audio_decoding.py", "media/video_decoding.py", encoder}
    graph = {path.stem: imports(path) for path in files("media")}
    decoders = {"millstream.media.container", "millstream.media.audio_decoding", "millstream.media.video_decoding"}
    importers = {name for name, used in graph.items() if decoders & used or "millstream.media" in used}
    assert importers == {"decoder_child", "audio_decoding", "video_decoding"}
    assert not [path for path in ROOT.rglob("*.py") if "millstream.media.decoder_child" in imports(path)]
    starters = {path.relative_to(ROOT).as_posix() for path in files("media") if "subprocess" in imports(path)}
    assert starters == {"media/decoder.py", "media/decoder_stream.py"}


def test_grammars_are_checked_by_their_child_alone() -> None:
    """A grammar may take minutes to compile, or exhaust the stack: not in the server's process."""
    used = {path.relative_to(ROOT).as_posix(): imports(path) for path in ROOT.rglob("*.py")}
    assert {name for name, found in used.items() if "millstream.text.grammars.check" in found} == {
        "text/grammars/child.py"
    }
    assert not [name for name, found in used.items() if "millstream.text.grammars.child" in found]
    assert not [path for path in files("text") if "subprocess" in imports(path)]


def test_downloads_run_in_their_child_alone() -> None:
    """A thread that waits for a network cannot be ended, a process can."""
    used = {path.relative_to(ROOT).as_posix(): imports(path) for path in ROOT.rglob("*.py")}
    assert {name for name, found in used.items() if "millstream.models.hub_fetch" in found} == {"models/hub_child.py"}
    assert not [name for name, found in used.items() if "millstream.models.hub_child" in found]
    waiting = LIBRARIES["threads"] | LIBRARIES["executors"]
    threaded = {path.name for path in files("models") if waiting & {name.split(".")[0] for name in imports(path)}}
    assert threaded == {"hub_child.py", "hub_fetch.py"}


def test_every_file_is_in_a_room() -> None:
    rooms = {room.split(".")[0] for room in ROOMS}
    ground = {f"{name}.py" for name in GROUND}
    assert {entry.name for entry in ROOT.iterdir()} <= {*rooms, *JOINERS, *ground, "page", "__pycache__", "py.typed"}


def test_no_module_of_ours_imports_in_a_circle() -> None:
    graph = {}
    for path in ROOT.rglob("*.py"):
        graph[module_of(path)] = imports(path)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " imports ".join((*trail, name))
        if name in done:
            return
        for other in graph[name] & graph.keys():
            # A package that names its own modules is no circle: they do not import it back.
            if other != name and not name.startswith(f"{other}."):
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    "floors", ["api.app, service.generation.service, engine.link, text.loading, media.preprocessor, models.source"]
)
def test_upper_floors_load_no_mlx(floors: str) -> None:
    code = "import sys, " + ", ".join(f"millstream.{name.strip()}" for name in floors.split(","))
    code += "; print(sorted(n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_composing_a_server_loads_no_mlx_and_no_extras() -> None:
    """MLX is imported on the owner thread, when a model is loaded. mcp is an extra, and takes a second to import: only
    if a server is configured."""
    code = "import sys, millstream.cli, millstream.server; "
    code += "from millstream.service.mcp.servers import McpServers; McpServers(())"
    code += "; print([name for name in ('mlx.core', 'mcp', 'opentelemetry.sdk') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
