"""A server whose ranks run on several nodes: the commands of each node.

The first node runs the server and its share of the ranks. Every other node runs its share as a
process per rank (`tgi-trio rank`), which connects to the first node. All nodes are needed to serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divided:
    """How a server's ranks are divided among nodes."""

    nodes: int  # at least 2
    ranks: int  # on all nodes together; each has equally many
    rank_words: tuple[str, ...] = ()  # arguments of every `rank` command beside leader and number

    @property
    def share(self) -> int:
        """The number of ranks of one node."""
        return self.ranks // self.nodes

    def leader_words(self, address: str) -> list[str]:
        """Return the arguments that the server gets beside its own.

        `address`: to which the ranks of the other nodes connect.
        """
        afar = self.ranks - self.share
        ranks = ["--num-shard", str(self.ranks), "--remote-ranks", str(afar)]
        return [*ranks, "--rank-address", address]

    def commands(self, part: int, leader: str) -> list[list[str]]:
        """Return the commands of a node's ranks; `part`: the node's number, 1 and up."""
        own = range(part * self.share, (part + 1) * self.share)
        arguments = ["--leader", leader, *self.rank_words]
        return [["rank", *arguments, "--rank", str(rank)] for rank in own]


def share_devices(visible: str, ranks: int) -> list[str]:
    """Return for each of `ranks` ranks its share of the `visible` devices (separated by commas).

    Every rank gets all of them if they cannot be divided evenly.
    """
    devices = [device for device in visible.split(",") if device]
    each, rest = divmod(len(devices), ranks)
    if rest:
        return [visible] * ranks
    return [",".join(devices[i * each : (i + 1) * each]) for i in range(ranks)]


def find_problems(nodes: int, ranks: int, gpus: float) -> Sequence[str]:
    """Return what is wrong with a division, a sentence each; `gpus`: reserved for one server."""
    problems = []
    if ranks % nodes:
        problems.append(f"--num-shard must be a multiple of --nodes-per-replica {nodes}: {ranks}")
    if gpus % nodes:
        problems.append(
            f"--replica-gpus must be a multiple of --nodes-per-replica {nodes}: {gpus:g}"
        )
    return problems
