"""slime: the same functions as miles; where it computes otherwise, ``miles.py`` asks for the system's name."""

from __future__ import annotations

from adapt.miles import method, said

__all__ = ["method", "said"]
