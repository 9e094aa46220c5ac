"""Triton's interpreter, for tests of kernels where there is no device."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def need_triton() -> None:
    """Skip the module where Triton is not installed; without a device it interprets from here on.

    To be called before anything imports Triton.
    """
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="Triton is not installed")
