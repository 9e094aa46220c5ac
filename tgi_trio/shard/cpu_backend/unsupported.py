"""The exception for models and settings that the CPU kernels do not support."""

from __future__ import annotations


class UnsupportedError(Exception):
    """The kernels cannot run this model, or cannot run on this machine."""


class UndividedError(UnsupportedError):
    """The kernels can run this model, but not on several ranks, or not with what is asked there."""
