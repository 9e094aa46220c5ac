"""How torch's threads wait for each other, and on which cores they run.

torch computes with libgomp's threads, which by default run anywhere and spin for about ten
milliseconds at each of the hundreds of barriers of a step. If another process (the router, a
client) wakes up on one of their cores, two of them end up on another core, where each spins during
the time slices that the other one needs: a step can then take five to fifteen times as long, for
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike

# Spins at a barrier before a thread sleeps: about a millisecond. Ordinary waits within a step are
# shorter; a thread that waits longer waits for one that has been preempted.
_SPINS = 30_000


def openmp_settings(
    threads: int, cores: ListLike[int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to set before torch is imported: libgomp reads them when it is loaded.

    `threads`: size of the team; `cores`: a processor for each. A single thread, or a team with
    fewer cores than threads, is not bound. Otherwise libgomp's threads and the one that imports
    torch are bound; threads that the latter starts afterwards inherit its core. If `environment`
    has settings for OpenMP already, nothing is added.
    """
    if threads < 2 or any(name.startswith(("OMP_", "GOMP_")) for name in environment):
        return {}
    settings = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(_SPINS)}
    if len(cores) >= threads:
        settings["OMP_PROC_BIND"] = "true"
        settings["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores[:threads])
    return settings
