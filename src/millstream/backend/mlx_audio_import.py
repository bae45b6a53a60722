"""Imports families of mlx-audio one by one. Import this module before anything of mlx-audio.

The packages of mlx-audio import all of their families at once: that takes seconds, needs transformers and SciPy, and
makes arrays lazily on whichever thread comes first, which is exactly what must not happen. Here each package runs its
`__init__` only if somebody asks it for a name that is not one of its modules.

The work is done when this module is imported, so that Python's lock of imports lets two owner threads do it once.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGES = (
    "mlx_audio.stt", "mlx_audio.stt.models", "mlx_audio.tts", "mlx_audio.tts.models", "mlx_audio.codec",
    "mlx_audio.codec.models",
)  # fmt: skip


def import_packages_lazily() -> None:
    """Packages that are imported already stay as they are."""
    for name in PACKAGES:
        if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
            module = importlib.util.module_from_spec(spec)
            module.__dict__["__getattr__"] = _Attributes(module)
            sys.modules[name] = module


class _Attributes:
    """Looks up what a package lacks: its modules are left to the import system, and all else is in its `__init__`."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __call__(self, name: str) -> Any:
        module, spec = self._module, self._module.__spec__
        if name.startswith("__") or importlib.util.find_spec(f"{module.__name__}.{name}") is not None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        del module.__dict__["__getattr__"]
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module)
        return getattr(module, name)


if importlib.util.find_spec("mlx_audio") is not None:
    import_packages_lazily()
