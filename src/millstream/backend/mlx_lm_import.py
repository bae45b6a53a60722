"""Keeps mlx-lm's tokenizers and command line tools out of an engine. Import this module before anything of mlx-lm.

An engine needs mlx-lm's models and its loader. Importing the package also imports its tools and transformers: 3.2 s of
CPU time instead of 1.1 s, at every start of an engine's process. Tokens are the business of `text/`, in the server.

The work is done when this module is imported, so that Python's lock of imports lets two owner threads do it once.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

PACKAGE, TOKENIZERS = "mlx_lm", "mlx_lm.tokenizer_utils"


def import_without_tokenizers() -> None:
    """Import mlx-lm's loader. If mlx-lm is imported already, as a whole, it stays as it is."""
    if PACKAGE in sys.modules or (spec := importlib.util.find_spec(PACKAGE)) is None:
        return
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)  # its __init__, which imports the tools, never runs
    sys.modules[TOKENIZERS] = _placeholder()
    try:
        importlib.import_module(f"{PACKAGE}.utils")
    except (ImportError, AttributeError):  # another version of mlx-lm needs more of them: import everything
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]


def _placeholder() -> ModuleType:
    """What mlx-lm's loader imports of its tokenizers: a type for annotations, and a function that no engine calls."""
    module: Any = ModuleType(TOKENIZERS)
    module.TokenizerWrapper = type("TokenizerWrapper", (), {})
    module.load = _refuse
    found: ModuleType = module
    return found


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"an engine does without mlx-lm's tokenizers: see {__name__}")


import_without_tokenizers()
