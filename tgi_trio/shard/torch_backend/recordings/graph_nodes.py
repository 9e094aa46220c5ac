"""Attributes of the kernel nodes of a CUDA graph, set before the graph is instantiated.

On a multiprocessor, shared memory and the level 1 cache are one memory. How much of it a kernel
wants as shared memory is its carve-out, an attribute of functions, of launches and of kernel nodes.
A function's attribute holds wherever the function is launched, and no document says whether a graph
reads it at capture, at instantiation or at launch. A node's attribute concerns that node alone and
takes precedence over the function's (CUDA driver API:
`CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`,
`CU_KERNEL_NODE_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`, `cuGraphKernelNodeSetAttribute`). So it
is set on the nodes, between capture and instantiation, and affects no other recording. Triton's
launcher passes no such attribute and does not have to.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

_DRIVER: Final = "libcuda.so.1"
_KERNEL: Final = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_CARVEOUT: Final = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_TYPES: Final = {  # argument types; every function returns a CUresult, 0 for success
    "cuGraphGetNodes": (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_size_t),
    ),
    "cuGraphNodeGetType": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "cuGraphKernelNodeSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
}


class DriverError(Exception):
    """The driver refused a request."""


class _AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, with the member used here; 64 bytes whatever the attribute."""

    _fields_ = (("pad", ctypes.c_char * 64), ("carveout", ctypes.c_uint))


class GraphNodes:
    """Sets attributes of the nodes of captured graphs, through the CUDA driver's library."""

    def __init__(self, library: Any) -> None:
        """`library`: as ctypes opens it. Raises AttributeError if it lacks one of the functions."""
        self._functions: dict[str, Any] = {}
        for name, types in _TYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
            self._functions[name] = function

    def prefer_carveout(self, graph: int, percent: int) -> None:
        """Make every kernel of a graph prefer `percent` of that memory as shared memory.

        `graph`: the handle of a captured graph; graphs instantiated from it earlier are unaffected.
        The preference is a hint: the driver sets aside more where a kernel needs it. Raises
        DriverError.
        """
        value = _AttributeValue(carveout=percent)
        for node in self._nodes(graph):
            kind = ctypes.c_int()
            self._call("cuGraphNodeGetType", node, ctypes.byref(kind))
            if kind.value == _KERNEL:
                asked = node, _CARVEOUT, ctypes.byref(value)
                self._call("cuGraphKernelNodeSetAttribute", *asked)

    def _nodes(self, graph: int) -> list[int | None]:
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        self._call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
        return list(nodes)[: count.value]

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result:
            raise DriverError(f"{name} returned {result}")


def open_nodes(device: torch.device) -> GraphNodes | None:
    """Return what sets attributes of a device's graph nodes; None where that is impossible.

    That is the case without NVIDIA's driver, with one that lacks the functions, and before torch
    2.8, which gives no access to a graph that has not been instantiated.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return None
    try:
        return GraphNodes(load_driver())
    except (OSError, AttributeError):
        return None


def load_driver() -> Any:
    """Return NVIDIA's driver, as ctypes opens it. Raises OSError if there is none."""
    return ctypes.CDLL(_DRIVER)
