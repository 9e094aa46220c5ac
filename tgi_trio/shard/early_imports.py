"""Imports of a shard before it knows its model, which are most of the work of a start."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from tgi_trio.devices import hide_devices

# By the likely backend: for the CPU kernels, what `cpu_backend/loading.py` imports late. On CPUs
# torch is left out: the number of its threads must be set before it is imported (`__main__.py`).
_MODULES: Final[dict[str, Sequence[str]]] = {
    "kernels": (
        "tgi_trio.shard.backend",
        "tgi_trio.shard.machine.device",
        "tgi_trio.shard.cpu_backend.loading",
        "tgi_trio.shard.sampling.guides",
        "tgi_trio.shard.cpu_backend.forward",
        "tgi_trio.shard.cpu_backend.cpu_runner",
        "tgi_trio.shard.cpu_backend.verified",
    ),
    "torch": ("tgi_trio.shard.backend", "tgi_trio.shard.machine.device"),
    "device": (
        "tgi_trio.shard.backend",
        "tgi_trio.shard.machine.device",
        "torch",
        "tgi_trio.shard.torch_backend.torch_loading",
    ),
}


def tasks_ahead(kind: str) -> Iterator[Callable[[], object]]:
    """Yield the imports of a `kind` of shard one by one, so that it can begin between two."""
    hide_devices(os.environ)  # before torch looks
    for name in _MODULES.get(kind, ()):
        yield partial(_import, name)


def _import(name: str) -> None:
    with suppress(ImportError):  # will be raised again when the module is needed
        importlib.import_module(name)
