"""Nodes of the prefix cache's tree, and what a prompt finds in it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from typing import NamedTuple, TypeAlias

Namespace: TypeAlias = tuple[int, str]  # (adapter, cache salt)


class Node:
    """A run of cached blocks. `pins` counts the sequences that use it or a node below it."""

    __slots__ = ("blocks", "children", "claims", "digests", "key", "namespace", "parent", "pins")

    def __init__(self, namespace: Namespace, parent: Node | None) -> None:
        self.namespace = namespace
        self.parent = parent
        self.key = b""  # tokens of `blocks`
        self.blocks: list[int] = []
        self.children: dict[bytes, Node] = {}  # by the tokens of their first block
        self.claims: dict[bytes, int] = {}  # tokens of the next block -> sequences computing it
        self.digests: list[bytes] = []  # of the first blocks, as many as were asked for
        self.pins = 0

    def __repr__(self) -> str:
        return f"<Node blocks={self.blocks} pins={self.pins} children={len(self.children)}>"


class Match(NamedTuple):
    """The longest cached prefix of a key."""

    node: Node | None  # its deepest node; None: the namespace has no root yet
    used: int  # blocks of `node` that match
    blocks: list[int]  # all matching blocks, from the start of the key
    evictable: int  # how many of them are unpinned
    claimed: bool  # another sequence is computing the next block now
    # Of `blocks`, and of those behind them of which the host's memory has copies; or none at all.
    digests: ListLike[bytes] = ()

    @property
    def path(self) -> set[Node]:
        """`node` and those above it."""
        path: set[Node] = set()
        node = self.node
        while node is not None:
            path.add(node)
            node = node.parent
        return path

    @property
    def hosted(self) -> int:
        """How many blocks behind `blocks` the host's memory has copies of."""
        return max(0, len(self.digests) - len(self.blocks))


def walk_down(root: Node) -> Iterator[Node]:
    """Yield `root` and everything below it, each node before its children."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
