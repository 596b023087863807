"""Formats numbers for people."""

import math


def duration(seconds: float) -> str:
    """Returns a duration as text: '42s', '3m05s' or '2h07m'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def short_number(value: float) -> str:
    """Returns a number with three significant digits: '950', '12.3k' or '1.20M'."""
    if not math.isfinite(value) or value < 1000:
        return f"{value:.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5:
            break
    return f"{value:#.3g}".rstrip(".") + unit
