"""How torch's threads wait for each other, and where they run.

torch computes with libgomp's threads, which by themselves run anywhere and spin for about ten
milliseconds at each of the hundreds of barriers of a step. Whoever wakes on one of their cores (the
router, a client) pushes two of them onto the other one, where each spins away the time slices that
the one it waits for needs: a step can then take five to fifteen times as long, for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike

# Looks at a barrier before a thread sleeps: about a millisecond. Ordinary waits within a step are
# shorter; a thread that waits longer waits for one that has lost its core.
_SPINS = 30_000


def openmp_settings(
    threads: int, cores: ListLike[int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to set before torch is imported: libgomp reads them when it is loaded.

    `threads` of a team, `cores` a processor for each. A single thread stays free to go where there
    is room; so does a team that has fewer cores than threads. Bound are libgomp's own threads and
    the one that imports torch; what that one starts afterwards begins on its core. An `environment`
    with settings for OpenMP is somebody's choice: nothing is added to it.
    """
    if threads < 2 or any(name.startswith(("OMP_", "GOMP_")) for name in environment):
        return {}
    settings = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(_SPINS)}
    if len(cores) >= threads:
        settings["OMP_PROC_BIND"] = "true"
        settings["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores[:threads])
    return settings
