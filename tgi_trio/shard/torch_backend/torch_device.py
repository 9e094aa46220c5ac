"""Devices by name, as torch wants them."""

from __future__ import annotations

import importlib.util

import torch


def resolve_device(name: str) -> torch.device:
    """Return the device of a name such as "cpu", "cuda:1" or "cuda", the current one of several.

    Always with an index where there are several: torch tells of no other device's memory.
    """
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_triton() -> bool:
    """Return whether our own kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None
