"""timm without torchvision, which it imports for its data sets and no tower of it computes with."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

_NAMES = [
    *("torchvision", "torchvision.datasets", "torchvision.ops", "torchvision.ops.misc"),
    *("torchvision.transforms", "torchvision.transforms.functional"),
]


class _Interpolation(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _StandIn(ModuleType):
    """A module that has a class by every name that is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Interpolation if name == "InterpolationMode" else type(name, (torch.nn.Module,), {})


@cache
def use_timm() -> None:
    """Let transformers' classes have towers of timm; skips the test where there is none."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: make test installs it without what it depends on")
    stands = {name: _StandIn(name) for name in _NAMES}
    for name, module in stands.items():
        if parent := name.rpartition(".")[0]:
            setattr(stands[parent], name.rpartition(".")[2], module)
    sys.modules.update(stands)
    try:
        timm = importlib.import_module("timm")
    finally:
        for name in stands:
            del sys.modules[name]
    from transformers.models.timm_wrapper import modeling_timm_wrapper
    from transformers.utils import import_utils

    import_utils.BACKENDS_MAPPING["timm"] = (lambda: True, "")
    vars(modeling_timm_wrapper)["timm"] = timm
