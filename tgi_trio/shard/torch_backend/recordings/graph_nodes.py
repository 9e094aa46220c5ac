"""What the driver may be told of a recorded graph's kernels before the graph is instantiated.

Shared memory and the level 1 cache of a multiprocessor are one memory, and how much of it a kernel
would have shared, its carve-out, is an attribute of functions, of launches and of graphs' kernel
nodes. A function's holds wherever it is launched, and no document says whether a captured graph
reads it when it is captured, instantiated or launched. A node's is its own, and takes precedence
over the function's (CUDA driver API: `CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`,
`CU_KERNEL_NODE_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`, `cuGraphKernelNodeSetAttribute`). So
nodes are told, between capture and instantiation, and no other recording has any of it. Triton's
launcher passes no such attribute, and need not.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

_DRIVER: Final = "libcuda.so.1"
_KERNEL: Final = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_CARVEOUT: Final = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_TYPES: Final = {  # of what the functions take; all return a CUresult, 0 for success
    "cuGraphGetNodes": (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_size_t),
    ),
    "cuGraphNodeGetType": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "cuGraphKernelNodeSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
}


class DriverError(Exception):
    """The driver refuses what it is asked."""


class _AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, as far as it is needed: 64 bytes, whatever the attribute."""

    _fields_ = (("pad", ctypes.c_char * 64), ("carveout", ctypes.c_uint))


class GraphNodes:
    """The nodes of graphs that have been captured, by functions of the driver's library."""

    def __init__(self, library: Any) -> None:
        """`library`: as ctypes opens it. Raises AttributeError where it has not all of them."""
        self._functions: dict[str, Any] = {}
        for name, types in _TYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
            self._functions[name] = function

    def prefer_carveout(self, graph: int, percent: int) -> None:
        """Have every kernel of a graph prefer `percent` of the memory to be shared.

        `graph`: its handle; what has been instantiated of it keeps what it has. The preference is
        a hint: the driver takes more where a kernel needs it. Raises DriverError.
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
    """Return the nodes of a device's graphs; None where they cannot be told anything.

    That is so without NVIDIA's driver, with one that has not the functions, and before torch 2.8,
    which shows no graph that has not been instantiated.
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
    """Return NVIDIA's driver, as ctypes opens it. Raises OSError where there is none."""
    return ctypes.CDLL(_DRIVER)
