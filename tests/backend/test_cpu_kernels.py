"""Kernels of a CPU are kept: real processes, MLX and the machine's own compiler, whose calls are noted."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.backend.kernels import cpu_compiler, fusing
from millstream.backend.kernels.cpu_kernels import COMPILER, keep_cpu_kernels
from millstream.backend.kernels.fusing import Fusing

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from pathlib import Path
import mlx.core as mx
from millstream.backend.device import use_device
use_device("cpu", Path(sys.argv[1]))
print(mx.compile(lambda x: mx.sigmoid(x) * x - 3)(mx.zeros(4)).tolist())
"""
ANSWER = "[-3.0, -3.0, -3.0, -3.0]"

# The suite keeps its own kernels (see conftest): this is what the PATH was before.
OWN = os.environ["TMPDIR"] if Path(os.environ.get("TMPDIR", "."), "bin", COMPILER).exists() else ""
PLAIN = os.pathsep.join(place for place in os.environ["PATH"].split(os.pathsep) if Path(place).parent != Path(OWN))
REAL = shutil.which(COMPILER, path=PLAIN)

pytestmark = pytest.mark.skipif(sys.platform != "linux" or REAL is None, reason="MLX calls g++ on Linux alone")


class Machine:
    """A PATH on which the compiler notes its calls, and folders that nobody has used."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kernels"
        self.calls = folder / "calls"
        self.temporary = folder / "tmp"
        self.tools = folder / "tools"
        for new in (self.temporary, self.tools):
            new.mkdir()
        self.calls.touch()
        compiler = self.tools / COMPILER
        compiler.write_text(f'#!/bin/sh\necho "$*" >> "{self.calls}"\nexec "{REAL}" "$@"\n')
        compiler.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PATH": f"{self.tools}{os.pathsep}{PLAIN}", "TMPDIR": str(self.temporary)}

    def start(self, prepare: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-c", SCRIPT, str(self.root)], subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=prepare)

    def run(self) -> tuple[str, str]:
        out, err = self.start().communicate(timeout=120)
        return out.strip(), err

    def compiled(self) -> int:
        return sum("-shared" in line for line in self.calls.read_text().splitlines())

    def libraries(self) -> list[Path]:
        return list(self.root.glob("*/mlx/*/cpu/*.so"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_later_process_compiles_nothing(machine: Machine) -> None:
    assert machine.run() == (ANSWER, "") and machine.compiled() == 1
    assert "-x c++-header" in machine.calls.read_text()
    assert machine.run() == (ANSWER, "") and machine.compiled() == 1
    assert not list(machine.temporary.iterdir()), "nothing lies where others may write"


def test_processes_that_need_a_kernel_at_once_compile_it_once(machine: Machine) -> None:
    runs = [machine.start() for _ in range(4)]
    assert [run.communicate(timeout=120)[0].strip() for run in runs] == [ANSWER] * 4
    assert machine.compiled() == 1


def test_half_a_library_is_compiled_again(machine: Machine) -> None:
    machine.run()
    [library] = machine.libraries()
    whole = library.read_bytes()
    for length in (0, 100, len(whole) - 1):
        library.write_bytes(whole[:length])
        assert machine.run() == (ANSWER, "")
    assert library.read_bytes() == whole


def test_a_folder_that_cannot_be_made(machine: Machine) -> None:
    machine.root.write_text("a file")
    out, err = machine.run()
    assert out == ANSWER and "compiled into the temporary folder" in err and machine.root.name in err
    assert list(machine.temporary.glob("mlx/*/cpu/*.so"))


def test_where_nothing_can_be_written_functions_run_unfused(machine: Machine) -> None:
    """As on a full disk: neither in the folder, also with kernels of an earlier process, nor in the temporary one."""
    machine.run()
    for library in machine.libraries():
        library.unlink()

    def write_little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    out, err = machine.start(write_little).communicate(timeout=120)
    assert out.strip() == ANSWER, err
    assert "compiled into the temporary folder" in err and "Functions are not fused, which costs speed" in err


STEPS = """
from millstream.backend.kernels.fusing import loads_unfused, steps_unfused
from millstream.errors import StepFailed
fused = mx.compile(lambda x: mx.exp(x) + {number})
work = lambda: fused(mx.zeros(1)).item()
"""


def test_a_compiler_that_fails_costs_one_step_and_no_load(machine: Machine) -> None:
    (machine.tools / COMPILER).write_text(
        '#!/bin/sh\n[ "$1" = --version ] || { echo "No space left on device"; exit 1; }\n'
    )
    begin = SCRIPT.rsplit("\n", 2)[0] + STEPS.format(number=1)
    step = "try: steps_unfused(work)()\nexcept StepFailed as error: print(error.message)\nprint(steps_unfused(work)())"
    for script, expected in (
        (f"{begin}{step}", "a kernel could not be compiled. Send the request again: no kernel is needed now.\n2.0\n"),
        (f"{begin}print(loads_unfused(work)())", "2.0\n"),
    ):
        command = [sys.executable, "-c", script, str(machine.root)]
        done = subprocess.run(command, env=machine.environment, capture_output=True, text=True, timeout=120)
        assert done.stdout == expected, done.stderr
        assert "Functions are not fused" in done.stderr and "No space left" in done.stderr


def test_functions_are_fused_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switched: list[bool] = []
    monkeypatch.setattr(fusing.mx, "disable_compile", lambda: switched.append(False))
    monkeypatch.setattr(fusing.mx, "enable_compile", lambda: switched.append(True))
    for name in ("LOOK_SECONDS", "TRY_SECONDS"):
        monkeypatch.setattr(fusing, name, 0.0)
    subject, full = Fusing(), False
    monkeypatch.setattr(fusing, "has_room", lambda folder: not full)
    subject.use(tmp_path)
    subject.look()
    assert switched == []
    full = True
    for _ in range(3):
        subject.look()
    assert switched == [False]
    full = False
    for _ in range(3):
        subject.look()
    assert switched == [False, True]
    assert not list(tmp_path.iterdir())


def test_an_installation_that_is_gone(machine: Machine) -> None:
    """Another one that shares the folder may have been removed while this one runs."""
    machine.run()
    [program] = machine.root.glob("*/bin/*")
    [library] = machine.libraries()
    program.write_text(program.read_text().replace(cpu_compiler.__file__, "/gone/cpu_compiler.py"))
    source = library.with_name("a.cpp")
    source.write_text("int a;")
    command = [program, "-shared", "-fPIC", source, "-o", source.with_suffix(".so")]
    subprocess.run(command, check=True, timeout=60)
    assert source.with_suffix(".so").exists()


def test_what_is_no_kernel_goes_to_the_compiler(machine: Machine) -> None:
    """Such as an extension that is linked of several objects: only MLX's kernels are known by their source alone."""
    machine.run()
    [program] = machine.root.glob("*/bin/*")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert "Free Software" in done.stdout and machine.calls.read_text().splitlines()[-1] == "--version"
    objects = [machine.temporary / name for name in ("a.o", "b.o")]
    library = machine.temporary / "both.so"
    found = []
    for number in (1, 2):
        for made, text in zip(objects, (f'extern "C" int a() {{ return {number}; }}', "int b;"), strict=True):
            made.with_suffix(".cpp").write_text(text)
            subprocess.run([program, "-fPIC", "-c", made.with_suffix(".cpp"), "-o", made], check=True, timeout=60)
        subprocess.run([program, "-shared", *objects, "-o", library], check=True, timeout=60)
        found.append(library.read_bytes())
    assert found[0] != found[1]


def test_an_error_of_the_compiler_is_passed_on(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    source, library = machine.temporary / "a.cpp", machine.temporary / "a.so"
    source.write_text("int a(")
    arguments = ["-shared", "-fPIC", str(source), "-o", str(library)]
    assert cpu_compiler.compile_kernel(str(REAL), machine.temporary, arguments) != 0
    assert "error" in capfd.readouterr().err and not library.exists()
    source.write_text("int a;")
    assert cpu_compiler.compile_kernel(str(REAL), machine.temporary, arguments) == 0 and library.exists()


def test_a_process_keeps_what_the_one_that_started_it_keeps(machine: Machine, tmp_path: Path) -> None:
    machine.run()
    [program] = machine.root.glob("*/bin/*")
    path = f"{program.parent}{os.pathsep}{machine.environment['PATH']}"
    kept = machine.environment | {"TMPDIR": str(program.parent.parent), "PATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "another"], env=kept, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == ANSWER and machine.compiled() == 1
    assert not (tmp_path / "another").exists()


def test_programs_that_are_started_keep_their_environment(machine: Machine) -> None:
    """Those that an engine in the server's own process shares it with: what they leave in the temporary folder, and
    what they compile, is none of ours."""
    seen = "import tempfile; print({name: os.environ[name] for name in ('TMPDIR', 'PATH')}, tempfile.gettempdir())"
    script = f"{SCRIPT}import os; {seen}"
    command = [sys.executable, "-c", script, machine.root]
    done = subprocess.run(command, env=machine.environment, capture_output=True, text=True, timeout=120)
    expected = {name: machine.environment[name] for name in ("TMPDIR", "PATH")}
    assert done.stdout.splitlines() == [ANSWER, f"{expected} {machine.temporary}"]
    assert machine.libraries()


def test_file_systems_that_run_no_programs_are_left(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PATH", "TMPDIR"):
        monkeypatch.setenv(name, machine.environment[name])
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: _without_programs(real(path)))
    with caplog.at_level("INFO"):
        assert keep_cpu_kernels(machine.root) == {}
    assert "runs no programs" in caplog.text


def _without_programs(found: os.statvfs_result) -> os.statvfs_result:
    return os.statvfs_result([*found[:8], found.f_flag | os.ST_NOEXEC, *found[9:]])
