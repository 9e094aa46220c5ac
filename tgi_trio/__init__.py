"""tgi-trio: a text-generation server on trio and shared-memory rings."""

from __future__ import annotations

__version__ = "0.1.0"
