"""Seconds as one says them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """For example `4.20 s`, `42.0 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"
