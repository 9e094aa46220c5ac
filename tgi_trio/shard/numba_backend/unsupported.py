"""What is raised where the CPU kernels cannot serve."""

from __future__ import annotations


class UnsupportedError(Exception):
    """The kernels cannot run this model, or not on this machine."""
