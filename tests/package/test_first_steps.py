"""A new user's path, as scripts/first_steps.sh goes it: from a clone to a streamed answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT = 900


def test_from_a_clone_to_a_streamed_answer(demo_path: Path) -> None:
    """With the dependencies of this environment: downloading them is pip's part, and takes minutes."""
    if not (REPOSITORY / ".git").exists() or not all(map(shutil.which, ("git", "make", "curl", "bash"))):
        pytest.skip("needs a clone, git, make, bash and curl")
    given = {"PACKAGES": sysconfig.get_paths()["purelib"], "PYTHON": sys.executable}
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "VENV")
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "first_steps.sh")],
        env={**{name: value for name, value in os.environ.items() if name not in left_out}, **given},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The server is ready at http://127.0.0.1:" in done.stdout
    assert "Answer:   The capital of France is Paris." in done.stdout
    if (REPOSITORY / "src" / "millstream" / "page").is_dir():
        assert "In the page: " in done.stdout or "The page is not tried: " in done.stdout
