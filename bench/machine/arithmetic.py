"""How many float32 multiply-adds the machine does: the floor of a large batch and of a prefill.

    python -m bench.machine.arithmetic

Where two processors of a virtual machine are threads of one core, two do no more than one.
"""

from __future__ import annotations

import numpy as np

from bench.machine.bandwidth import seconds_at_once
from tgi_trio.shard.cpu_backend.arena import address
from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.vectors import add, fill, fma, store_float, total
from tgi_trio.shard.cpu_backend.machine_code.entry import open_kernel
from tgi_trio.shard.cpu_backend.weight_layout import LANES
from tgi_trio.shard.machine.cores import usable_cores

_CHAINS = 12  # that do not wait for each other: more than multiply-adds are under way at a time
_ROUNDS = 2_000_000


@entry
def multiply_add_chains(rounds, where):
    """Do `rounds` multiply-adds on each of twelve vectors; writes a sum of all of them, float32."""
    start = np.float32(1.0)
    a, b, c, d = fill(start), fill(start + 1), fill(start + 2), fill(start + 3)
    e, f, g, h = fill(start + 4), fill(start + 5), fill(start + 6), fill(start + 7)
    i, j, k, m = fill(start + 8), fill(start + 9), fill(start + 10), fill(start + 11)
    x, y = fill(np.float32(0.9999)), fill(np.float32(0.001))
    for _ in range(rounds):
        a, b, c, d = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y)
        e, f, g, h = fma(e, x, y), fma(f, x, y), fma(g, x, y), fma(h, x, y)
        i, j, k, m = fma(i, x, y), fma(j, x, y), fma(k, x, y), fma(m, x, y)
    first = add(add(add(a, b), add(c, d)), add(add(e, f), add(g, h)))
    store_float(where, total(add(first, add(add(i, j), add(k, m)))))


class Arithmetic:
    """`gigaflops()` is one probe: a multiply-add counts as two."""

    def __init__(self, threads: int | None = None) -> None:
        """One thread per physical core by default."""
        self._threads = threads or len(usable_cores())
        self._sums = np.zeros((self._threads, LANES), np.float32)  # a line of the cache for each
        self._multiply = open_kernel(multiply_add_chains, 2)

    def gigaflops(self, repeats: int = 3) -> float:
        """Return the best of `repeats`, all threads computing at once."""
        work = [(_ROUNDS, address(own)) for own in self._sums]
        seconds = min(seconds_at_once(self._multiply, work) for _ in range(repeats))
        return 2 * LANES * _CHAINS * _ROUNDS * self._threads / 1e9 / seconds


if __name__ == "__main__":
    for threads in range(1, len(usable_cores()) + 1):
        print(f"{threads} threads: {Arithmetic(threads).gigaflops():.0f} GFLOP/s")
