"""What the option groups share: the default settings and the wording of a default."""

from __future__ import annotations

import argparse

from millstream.config import Settings

DEFAULTS = Settings()

Group = argparse._ArgumentGroup


def with_default(text: str, default: object) -> str:
    """The help text with its default.

    Options that `--config` has too get no argparse default: `settings_of` must see which of them were given.
    """
    return f"{text} (default: {default})"
