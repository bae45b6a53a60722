"""The design's table of imports, held against the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import millstream

ROOT = Path(millstream.__file__).parent

FORBIDDEN = {
    "api": {"threading", "mlx"},
    "service": {"starlette", "threading", "mlx"},
    "text": {"starlette", "asyncio", "threading", "mlx"},
    "media": {"starlette", "asyncio", "threading", "mlx"},
    "models": {"starlette", "asyncio", "threading", "mlx"},
    "engine": {"starlette", "asyncio", "mlx"},
    "backend": {"starlette", "asyncio", "threading"},
}
GROUPS = {
    "starlette": {"starlette", "fastapi", "uvicorn"},
    "asyncio": {"asyncio", "uvloop", "anyio"},
    "threading": {"threading", "_thread", "multiprocessing"},
    "mlx": {"mlx", "mlx_lm", "mlx_vlm"},
}
# Each floor may import itself and what stands further down. Whoever joins floors is on none.
FLOORS = ["api", "service", "backend", "text", "media", "models", "engine"]
JOINERS = {"cli", "bench", "compose.py", "server.py", "__main__.py"}
# A dialect needs only the service's protocols; MLX code needs no text work.
EXTRA_RULES = {"backend": {"text", "media"}, "text": {"engine"}, "media": {"engine"}, "models": {"engine"}}


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


def files(floor: str) -> list[Path]:
    return sorted((ROOT / floor).rglob("*.py"))


@pytest.mark.parametrize("floor", FORBIDDEN)
def test_a_floor_keeps_to_its_libraries(floor: str) -> None:
    assert files(floor)
    banned = set().union(*(GROUPS[group] for group in FORBIDDEN[floor]))
    for path in files(floor):
        used = {name.split(".")[0] for name in imports(path)} & banned
        assert not used, f"{path.relative_to(ROOT)} imports {used}"


@pytest.mark.parametrize("floor", FLOORS)
def test_calls_go_down(floor: str) -> None:
    above = set(FLOORS[: FLOORS.index(floor)]) | {"cli", "compose", "server"} | EXTRA_RULES.get(floor, set())
    for path in files(floor):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "millstream" and len(parts) > 1:
                assert parts[1] not in above, f"{path.relative_to(ROOT)} imports {name}"


def test_api_knows_the_service_by_its_protocols_alone() -> None:
    for path in files("api"):
        for name in imports(path):
            if name.startswith("millstream.service"):
                assert name.startswith("millstream.service.ports"), f"{path.relative_to(ROOT)} imports {name}"


def test_the_ground_stands_on_nothing() -> None:
    for name in ("types.py", "errors.py", "config.py", "sandbox.py"):
        assert not {item for item in imports(ROOT / name) if item.startswith("millstream")}


def test_the_decoder_of_videos_is_imported_by_its_child_alone() -> None:
    """FFmpeg reads what strangers wrote: not in the server's process."""
    users = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "av" in imports(path)}
    assert users == {"media/container.py", "media/audio_decoding.py", "media/video_decoding.py"}
    graph = {path.stem: imports(path) for path in files("media")}
    decoders = {"millstream.media.container", "millstream.media.audio_decoding", "millstream.media.video_decoding"}
    importers = {name for name, used in graph.items() if decoders & used or "millstream.media" in used}
    assert importers == {"decoder_child", "audio_decoding", "video_decoding"}
    assert not [path for path in ROOT.rglob("*.py") if "millstream.media.decoder_child" in imports(path)]
    starters = {path.relative_to(ROOT).as_posix() for path in files("media") if "subprocess" in imports(path)}
    assert starters == {"media/decoder.py"}


def test_grammars_are_checked_by_their_child_alone() -> None:
    """A grammar may take minutes to compile, or exhaust the stack: not in the server's process."""
    used = {path.relative_to(ROOT).as_posix(): imports(path) for path in ROOT.rglob("*.py")}
    assert {name for name, found in used.items() if "millstream.text.grammar_check" in found} == {
        "text/grammar_child.py"
    }
    assert not [name for name, found in used.items() if "millstream.text.grammar_child" in found]
    assert not [path for path in files("text") if "subprocess" in imports(path)]


def test_every_file_is_on_a_floor() -> None:
    known = {*FLOORS, *JOINERS, "types.py", "errors.py", "config.py", "sandbox.py", "__init__.py", "__pycache__"}
    assert {entry.name for entry in ROOT.iterdir()} <= known


def test_no_module_of_ours_imports_in_a_circle() -> None:
    graph = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("millstream", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = imports(path)
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


def test_composing_a_server_loads_no_mlx_either() -> None:
    """MLX is imported on the owner thread, when a model is loaded."""
    code = "import sys, millstream.cli; print('mlx.core' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
