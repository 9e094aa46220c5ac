"""A server whose ranks are on several machines: what each of its parts runs.

The first part is the server with its own share of the ranks; every other runs the rest of them, a
process each, which call the first (`rank`). No part serves without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divided:
    """How a server is cut."""

    nodes: int  # parts, at least 2
    ranks: int  # of all of them; each part has as many
    rank_words: tuple[str, ...] = ()  # of each `rank`, but for whose it is and which

    @property
    def share(self) -> int:
        """The number of ranks of a part."""
        return self.ranks // self.nodes

    def leader_words(self, address: str) -> list[str]:
        """Return what the server is told beside its own words; `address`: for ranks to call."""
        afar = self.ranks - self.share
        ranks = ["--num-shard", str(self.ranks), "--remote-ranks", str(afar)]
        return [*ranks, "--rank-address", address]

    def commands(self, part: int, leader: str) -> list[list[str]]:
        """Return the command of each rank of a part but the first (1 and up)."""
        own = range(part * self.share, (part + 1) * self.share)
        told = ["--leader", leader, *self.rank_words]
        return [["rank", *told, "--rank", str(rank)] for rank in own]


def share_devices(visible: str, ranks: int) -> list[str]:
    """Return which devices each of `ranks` ranks sees, of those that are visible, by commas.

    Each sees all of them where they cannot be shared out evenly.
    """
    devices = [device for device in visible.split(",") if device]
    each, rest = divmod(len(devices), ranks)
    if rest:
        return [visible] * ranks
    return [",".join(devices[i * each : (i + 1) * each]) for i in range(ranks)]


def find_problems(nodes: int, ranks: int, gpus: float) -> Sequence[str]:
    """Return what is wrong with a division, a sentence each; `gpus`: set aside for a server."""
    problems = []
    if ranks % nodes:
        problems.append(f"--num-shard must be a multiple of --nodes-per-replica {nodes}: {ranks}")
    if gpus % nodes:
        problems.append(
            f"--replica-gpus must be a multiple of --nodes-per-replica {nodes}: {gpus:g}"
        )
    return problems
