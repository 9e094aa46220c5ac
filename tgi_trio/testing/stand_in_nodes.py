"""The functions of NVIDIA's driver for nodes of CUDA graphs, over a stand-in's graphs.

    with StandInDevice(), mock.patch.object(graph_nodes, "load_driver", StandInNodes):
        runner = load_torch_runner(settings, device="cuda:0")

ctypes calls them with the same arguments as the driver's, and they read and write the same memory.
See `stand_in_driver.py` for the graphs.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from tgi_trio.testing.stand_in_driver import KEPT_GRAPHS, Graph

INVALID_VALUE: Final = 1  # CUDA_ERROR_INVALID_VALUE
_CARVEOUT: Final = 14  # CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_KERNEL, _COPY = 0, 1  # CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMCPY
_NODES: Final = ctypes.POINTER(ctypes.c_void_p)
_COUNT: Final = ctypes.POINTER(ctypes.c_size_t)
_KIND: Final = ctypes.POINTER(ctypes.c_int)


class StandInNodes:
    """Stands in for the driver's library; each function returns 0 or an error code."""

    def __init__(self) -> None:
        self.known: tuple[int, ...] = (_CARVEOUT,)  # attributes that may be set
        self._places: dict[int, tuple[int, int]] = {}  # graph's handle and place in it, by node
        self.cuGraphGetNodes: Any = _made(self._get_nodes, ctypes.c_void_p, _NODES, _COUNT)
        self.cuGraphNodeGetType: Any = _made(self._get_type, ctypes.c_void_p, _KIND)
        types = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        self.cuGraphKernelNodeSetAttribute: Any = _made(self._set_attribute, *types)

    def _get_nodes(self, handle: int, nodes: Any, count: Any) -> int:
        graph = KEPT_GRAPHS.get(handle)
        if graph is None:
            return INVALID_VALUE
        if nodes:
            room = int(count.contents.value)
            for place in range(min(room, len(graph.kernels))):
                node = len(self._places) + 1
                self._places[node] = handle, place
                nodes[place] = node
        count.contents.value = len(graph.kernels)
        return 0

    def _get_type(self, node: int, kind: Any) -> int:
        graph, place = self._find(node)
        if graph is None:
            return INVALID_VALUE
        kind.contents.value = _KERNEL if graph.kernels[place] else _COPY
        return 0

    def _set_attribute(self, node: int, attribute: int, value: int) -> int:
        graph, place = self._find(node)
        percent = ctypes.c_uint.from_address(value).value
        if graph is None or not graph.kernels[place] or attribute not in self.known:
            return INVALID_VALUE
        if percent > 100:
            return INVALID_VALUE
        graph.attributes[place] = percent
        return 0

    def _find(self, node: int) -> tuple[Graph | None, int]:
        handle, place = self._places.get(node, (0, 0))
        return KEPT_GRAPHS.get(handle), place


def _made(function: Any, *types: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(function)
