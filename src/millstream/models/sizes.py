"""Sizes of files as people read them."""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB")


def size_text(size: float) -> str:
    """Decimal, as the hub and shops count: `4.3 GB`."""
    if size < 1000:
        return f"{size:.0f} bytes"
    for unit in _UNITS:
        size /= 1000
        if size < 999.5 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
