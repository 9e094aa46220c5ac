"""What a single row fetches ahead: it reads each weight once, so memory sets its pace."""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.vectors import prefetch, prefetch_near

_LINE = 64  # bytes of a cache line


@kernel
def fetch_for_one(way, where, bytes_):
    """Prefetch so many bytes at `where`, which is `way.ahead` of what is read, and needed soon.

    With `way.further` as many that lie so far behind them go into the second-level cache, out of
    which they are fetched when their turn has come.
    """
    for i in range(0, bytes_, _LINE):
        prefetch_near(where + i)
    if way.further:
        where += way.further
        for i in range(0, bytes_, _LINE):
            prefetch(where + i)
