"""Tensors that claim to be on a simulated device; see `stand_in_device.py`."""

# mypy: disable-error-code="override, assignment, arg-type, no-untyped-call, no-any-return"
# The types of torch's extension points do not allow for extensions.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class MixedDevices(RuntimeError):
    """An operation has tensors of the host and of the device."""


class RecordingBroken(Exception):
    """Something that cannot be captured, for example because the host would have to wait."""


class DeviceLost(RuntimeError):
    """The device has failed permanently."""


class DeviceTensor(torch.Tensor):
    """A tensor that claims to be on `place`; `held` has its numbers."""

    held: torch.Tensor
    place: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, place: torch.device) -> DeviceTensor:
        # "meta" for torch's own code, which would otherwise look for a driver.
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held, made.place = held, place
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} over a tensor of a stand-in device that is no longer there")

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def is_cuda(self) -> bool:
        return self.place.type == "cuda"

    def __getitem__(self, index: Any) -> Any:
        # torch would make a tensor "meta" of a list, which has no numbers.
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(
            tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
        )

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.place} device type tensor to numpy")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.held!r})"


def held(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x


def as_views_of(tensors: Sequence[DeviceTensor]) -> AbstractContextManager[object]:
    """Return a block in which results are made that may be views of `tensors`.

    A view of what was made outside of inference mode is no tensor of that mode, inside it as well:
    torch counts the versions of the two together.
    """
    if not torch.is_inference_mode_enabled() or all(each.is_inference() for each in tensors):
        return nullcontext()
    return torch.inference_mode(False)
