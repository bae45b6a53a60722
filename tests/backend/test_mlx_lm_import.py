"""What an engine imports of mlx-lm: no tokenizers, whatever the version of mlx-lm needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed(code: str, first: Path | None = None) -> str:
    path = os.pathsep.join(str(place) for place in [first, *sys.path] if place)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_engine_imports_no_transformers() -> None:
    code = "import sys; from millstream.loading.backends import generation_backend as make; "
    code += "from millstream.loading.settings import EngineSettings; from millstream.models.source import ModelSource; "
    code += "from pathlib import Path; make(ModelSource('m', 'folder', Path('m')), EngineSettings()); "
    code += "print([n for n in ('mlx_lm.utils', 'mlx_lm.generate', 'transformers') if n in sys.modules])"
    assert printed(code) == "['mlx_lm.utils']"


def write_package(folder: Path, needs: str) -> Path:
    """A package called mlx_lm, whose loader imports `needs` of its tokenizers."""
    package = folder / "mlx_lm"
    package.mkdir()
    (package / "__init__.py").write_text("from . import utils\nwhole = True\n")
    (package / "utils.py").write_text(f"from .tokenizer_utils import {needs}\n")
    (package / "tokenizer_utils.py").write_text("TokenizerWrapper = load = other = print\n")
    return folder


SHOW = "import millstream.backend.mlx_lm_import, mlx_lm, mlx_lm.utils; print(hasattr(mlx_lm, 'whole'))"


def test_the_package_itself_is_not_run(tmp_path: Path) -> None:
    assert printed(SHOW, write_package(tmp_path, "TokenizerWrapper, load")) == "False"


def test_a_version_that_needs_more_is_imported_as_a_whole(tmp_path: Path) -> None:
    assert printed(SHOW, write_package(tmp_path, "other")) == "True"


def test_a_whole_package_stays(tmp_path: Path) -> None:
    code = "import mlx_lm; " + SHOW
    assert printed(code, write_package(tmp_path, "TokenizerWrapper, load")) == "True"
