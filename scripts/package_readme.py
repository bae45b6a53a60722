"""Hatch's hook for the package's description: README.md, whose links into the repository become whole addresses.

A package index shows README.md without the repository around it, so relative links and pictures would lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|mailto:|#)([^)\s]+)")


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata["urls"]["Repository"]

        def whole(link: re.Match[str]) -> str:
            view = "raw" if link[1] else "blob"
            return f"{link[1]}{link[2]}{repository}/{view}/v{metadata['version']}/{link[3]}"

        text = LINK.sub(whole, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
