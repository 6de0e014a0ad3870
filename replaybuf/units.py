"""Numbers for people."""

from __future__ import annotations

_SECONDS = ((86_400, "d"), (3600, "h"), (60, "m"))


def number(value: float | int | None, digits: int = 0) -> str:
    """Format a number: 1,234 or 0.417; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def short(value: int | None) -> str:
    """Format a count of tokens: 812, 13.4k, 2.1M."""
    if value is None:
        return "-"
    return _scaled(value, 1000, ("", "k", "M", "G", "T"), "")


def size(value: int | None) -> str:
    """Format a number of bytes: 812 B, 13.4 kB, 2.1 MB."""
    if value is None:
        return "-"
    return _scaled(value, 1000, ("B", "kB", "MB", "GB", "TB"), " ")


def age(seconds: float | None) -> str:
    """Format an elapsed time: 12s, 4m, 3h, 2d."""
    if seconds is None:
        return "-"
    for length, unit in _SECONDS:
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}" if seconds < 10 * length else f"{seconds / length:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"


def _scaled(value: int, step: int, units: tuple[str, ...], space: str) -> str:
    scaled = float(value)
    for unit in units:
        if scaled < step or unit == units[-1]:
            break
        scaled /= step
    text = f"{scaled:.0f}" if unit == units[0] or scaled >= 100 else f"{scaled:.1f}"
    return f"{text}{space}{unit}"
