"""The exception for models and settings that the CPU kernels do not support."""

from __future__ import annotations


class UnsupportedError(Exception):
    """The kernels cannot run this model, or cannot run on this machine."""
