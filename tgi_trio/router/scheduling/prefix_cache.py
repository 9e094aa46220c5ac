"""The prefix cache: a radix tree of computed KV blocks, keyed by token ids, in whole blocks.

A node is a run of blocks with the tokens for which they were computed; a path from a root spells a
prefix. Children are looked up by the tokens of their first block rather than by a hash, so two
prefixes cannot collide. There is one root per namespace (adapter, cache salt).

A sequence that uses a prefix pins the prefix's last node and all above it. Unpinned nodes may be
evicted, least recently used first and leaves before their parents. Cached blocks are never written
again: a match leaves at least the last token of a prompt to be computed, in a block of the
sequence's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Final, TypeAlias

from tgi_trio.router.scheduling.block_digests import Origin, begin_digests, extend_digests
from tgi_trio.router.scheduling.prefix_nodes import Match, Namespace, Node, walk_down

TOKEN_BYTES = 4  # keys are the bytes of int32 token ids
# Blocks of a node. What changes a node copies its key, and a prompt of a million tokens is
# published in hundreds of chunks: without a bound each of them would copy all that came before.
MOST_BLOCKS: Final = 1024

# (digests of blocks, blocks, their origins)
Leaving: TypeAlias = Callable[[list[bytes], list[int], list[Origin]], None]


class PrefixCache:
    """The tree, its pins, and the order of eviction."""

    def __init__(self, block_size: int, leaving: Leaving | None = None) -> None:
        """`leaving`: is told of each run of blocks that `evict` removes."""
        self.block_size = block_size
        self._leaving = leaving
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        # Unpinned nodes, least recently used first. A child always comes before its parent, since
        # unpinning walks upwards and a pin of a child pins its parent too.
        self._unpinned: OrderedDict[Node, None] = OrderedDict()
        self.evictable = 0  # blocks of unpinned nodes
        self.pinned = 0  # blocks of pinned nodes

    def match(self, namespace: Namespace, key: bytes, most: int) -> Match:
        """Return the longest cached prefix of `key`, at most `most` blocks. Changes nothing."""
        node = self._roots.get(namespace)
        blocks: list[int] = []
        used = evictable = 0
        claimed = False
        size = self._block_bytes
        while node is not None:
            at = len(blocks)
            following = key[at * size : (at + 1) * size] if at < most else b""
            child = node.children.get(following)
            if child is None:
                claimed = following in node.claims
                break
            node, used = child, self._common(child, key, at, most)
            blocks += child.blocks if used == len(child.blocks) else child.blocks[:used]
            if not child.pins:
                evictable += used
            if used < len(child.blocks):
                break
        return Match(node, used, blocks, evictable, claimed)

    def _common(self, node: Node, key: bytes, at: int, most: int) -> int:
        """Return how many blocks of `node` match `key` from block `at` on; the first one does."""
        size = self._block_bytes
        limit = min(len(node.blocks), most - at)
        start = at * size
        if limit == len(node.blocks) and key.startswith(node.key, start):
            return limit
        low, high = 1, limit  # bisection: `low` blocks are known to be equal
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(node.key[low * size : middle * size], start + low * size):
                low = middle
            else:
                high = middle - 1
        return low

    def pin(self, namespace: Namespace, match: Match) -> Node:
        """Pin a match and return its last node, which the sequence passes to `unpin` later."""
        node = match.node
        if node is None:
            node = self._roots[namespace] = Node(namespace, None)
        elif match.used < len(node.blocks):
            node = self._split(node, match.used)
        self._pin_path(node, None)
        return node

    def unpin(self, node: Node) -> None:
        """Remove a pin from `node` and all above it."""
        here: Node | None = node
        while here is not None:
            here.pins -= 1
            if not here.pins:
                if here.parent is None:
                    self._drop_root_if_bare(here)
                else:
                    self._unpinned[here] = None
                    self.evictable += len(here.blocks)
                    self.pinned -= len(here.blocks)
            here = here.parent

    def _pin_path(self, node: Node, above: Node | None) -> None:
        """Pin `node` and its ancestors up to, but not including, `above`."""
        here: Node | None = node
        while here is not above and here is not None:
            if not here.pins and here.parent is not None:
                del self._unpinned[here]
                self.evictable -= len(here.blocks)
                self.pinned += len(here.blocks)
            here.pins += 1
            here = here.parent

    def _split(self, node: Node, at: int) -> Node:
        """Split `node` after `at` blocks; returns the new upper part, which the caller must pin."""
        size = self._block_bytes
        parent = node.parent
        if parent is None:
            raise ValueError("a root holds no blocks to split")
        upper = Node(node.namespace, parent)
        upper.key, upper.blocks, upper.pins = node.key[: at * size], node.blocks[:at], node.pins
        parent.children[upper.key[:size]] = upper
        upper.digests, node.digests = node.digests[:at], node.digests[at:]
        node.key, node.blocks, node.parent = node.key[at * size :], node.blocks[at:], upper
        upper.children[node.key[:size]] = node
        if not upper.pins:
            self._unpinned[upper] = None
        return upper

    def insert(self, node: Node, tokens: bytes, blocks: list[int]) -> tuple[Node, list[int]]:
        """Publish `blocks`, computed for `tokens`, below `node`, which the caller has pinned.

        Returns the node at the end of the run, to which the pin of `node` has moved, and those of
        `blocks` that stay the caller's because the same tokens had been published before.
        """
        size = self._block_bytes
        top, at = node, 0
        spare: list[int] = []
        while at < len(blocks):
            child = node.children.get(tokens[at * size : (at + 1) * size])
            if child is None:
                break
            used = self._common(child, tokens, at, len(blocks))
            spare += blocks[at : at + used]
            at += used
            node = child if used == len(child.blocks) else self._split(child, used)
        if node is top and node.pins == 1 and node.parent is not None and not node.children:
            # Extend the caller's own leaf: few nodes per prompt, however many chunks it has.
            more = blocks[at : at + max(0, MOST_BLOCKS - len(node.blocks))]
            node.key += tokens[at * size : (at + len(more)) * size]
            node.blocks += more
            self.pinned += len(more)
            at += len(more)
        node = self._grow(node, tokens, blocks, at)
        self._pin_path(node, top)
        return node, spare

    def _grow(self, node: Node, tokens: bytes, blocks: list[int], at: int) -> Node:
        """Add `blocks` from `at` on below `node` as nodes of their own; returns the last one."""
        size = self._block_bytes
        leaves: list[Node] = []
        while at < len(blocks):
            leaf = Node(node.namespace, node)
            leaf.blocks = blocks[at : at + MOST_BLOCKS]
            leaf.key = tokens[at * size : (at + len(leaf.blocks)) * size]
            node.children[leaf.key[:size]] = leaf
            self.evictable += len(leaf.blocks)
            at += len(leaf.blocks)
            leaves.append(leaf)
            node = leaf
        self._unpinned.update(dict.fromkeys(reversed(leaves)))  # a child before its parent
        return node

    def recent(self) -> Iterator[Node]:
        """Yield unpinned nodes, most recently used first, and each after those above it."""
        return reversed(self._unpinned)

    def graft(
        self, namespace: Namespace, parent: Node | None, key: bytes, blocks: list[int]
    ) -> Node:
        """Add a run of blocks, computed for `key`, as the least recently used of all; returns it.

        `parent`: the node before it; None: it begins prompts. Raises ValueError if a run there
        begins with the same tokens.
        """
        if parent is None:
            parent = self._roots.setdefault(namespace, Node(namespace, None))
        first = key[: self._block_bytes]
        if first in parent.children:
            raise ValueError("a prefix is there already")
        leaf = parent.children[first] = Node(namespace, parent)
        leaf.key, leaf.blocks = key, blocks
        self._unpinned[leaf] = None
        self._unpinned.move_to_end(leaf, last=False)
        self.evictable += len(blocks)
        return leaf

    def continues(self, node: Node, tokens: bytes) -> bool:
        """Whether a block with the first of `tokens` is published as a child of `node`."""
        return tokens[: self._block_bytes] in node.children

    def claim(self, node: Node, following: bytes) -> None:
        """Announce that the block with the tokens `following` after `node` is being computed."""
        node.claims[following] = node.claims.get(following, 0) + 1

    def unclaim(self, node: Node, following: bytes) -> None:
        """Withdraw a claim."""
        node.claims[following] -= 1
        if not node.claims[following]:
            del node.claims[following]

    def evict(self, count: int, spared: Container[Node] = frozenset()) -> list[int]:
        """Remove up to `count` unpinned blocks, but of no node in `spared`, and return them."""
        evicted: list[int] = []
        for node, keep in list(self.next_out(count, spared)):
            if keep:
                evicted += self._let_go(node, keep)
                del node.blocks[keep:], node.digests[keep:]
                node.key = node.key[: keep * self._block_bytes]
            else:
                evicted += self._let_go(node, 0)
                self._remove(node)
        self.evictable -= len(evicted)
        return evicted

    def next_out(
        self, count: int, spared: Container[Node] = frozenset()
    ) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of the next `count` blocks to be evicted, in order, and how many blocks
        each would keep.

        `spared`: nodes that stay.
        """
        for node in self._unpinned:
            if count <= 0:
                return
            if node not in spared:
                keep = max(0, len(node.blocks) - count)
                count -= len(node.blocks) - keep
                yield node, keep

    def _let_go(self, node: Node, keep: int) -> list[int]:
        """Return the blocks of `node` behind the first `keep`, which are evicted."""
        if self._leaving is not None:
            digests, origins = self.digests_of(node)[keep:], self.origins_of(node, keep)
            self._leaving(digests, node.blocks[keep:], origins)
        return node.blocks[keep:]

    def digests_of(self, node: Node, last: int | None = None) -> list[bytes]:
        """Return the digests of a node's blocks, or at least of its first `last`."""
        path = [node]
        while (above := path[-1].parent) is not None and len(above.digests) < len(above.blocks):
            path.append(above)
        before = begin_digests(node.namespace)
        if above is not None and above.digests:
            before = above.digests[-1]
        for each in reversed(path):
            most = last if each is node else None
            extend_digests(each.digests, before, each.key, self._block_bytes, most)
            before = each.digests[-1] if each.digests else before
        return node.digests

    def origins_of(self, node: Node, first: int = 0, last: int | None = None) -> list[Origin]:
        """Return what a node's blocks were computed for, from the `first` up to the `last`."""
        size, before = self._block_bytes, begin_digests(node.namespace)
        if node.parent is not None and node.parent.blocks:
            before = self.digests_of(node.parent)[-1]
        last = len(node.blocks) if last is None else last
        digests = self.digests_of(node, last)
        befores = digests[first - 1 : last] if first else [before, *digests[:last]]
        keys = (node.key[start : start + size] for start in range(first * size, last * size, size))
        pairs = zip(befores, keys, strict=False)  # the last digest stands before the next node
        return [Origin(node.namespace, each, key) for each, key in pairs]

    def discard(self, node: Node, most: int) -> list[int]:
        """Remove the last `most` blocks up to `node`, in whole nodes; returns them.

        Those stay that are pinned, or have others behind them.
        """
        discarded: list[int] = []
        here: Node | None = node
        while here is not None and here in self._unpinned and not here.children:
            if len(discarded) + len(here.blocks) > most:
                break
            discarded += here.blocks
            self._remove(here)
            here = here.parent
        self.evictable -= len(discarded)
        return discarded

    def evict_adapter(self, adapter: int) -> tuple[list[int], bool]:
        """Remove the unpinned prefixes of an adapter.

        Returns their blocks, and whether pinned ones are left.
        """
        evicted: list[int] = []
        left = False
        for root in [root for root in self._roots.values() if root.namespace[0] == adapter]:
            for node in reversed(list(walk_down(root))):  # children before their parents
                if node in self._unpinned:
                    evicted += node.blocks
                    self._remove(node)
            left |= bool(root.pins)
        self.evictable -= len(evicted)
        return evicted, left

    def _remove(self, node: Node) -> None:
        """Take an unpinned leaf out of the tree."""
        parent = node.parent
        if node.children or parent is None:
            raise AssertionError(f"{node} would leave its children behind")
        del self._unpinned[node]
        del parent.children[node.key[: self._block_bytes]]
        if parent.parent is None:
            self._drop_root_if_bare(parent)

    def _drop_root_if_bare(self, root: Node) -> None:
        # Clients choose salts, so roots without blocks must not accumulate.
        if not root.pins and not root.children:
            del self._roots[root.namespace]

    def clear(self) -> None:
        """Forget everything, pins included."""
        self.__init__(self.block_size, self._leaving)  # type: ignore[misc]

    def nodes(self) -> Iterator[Node]:
        """Yield every node, roots included."""
        for root in self._roots.values():
            yield from walk_down(root)

    def check(self, pinned: Iterable[Node]) -> None:
        """Raise AssertionError if tree, pins, counts or eviction order are wrong.

        `pinned`: a node for every pin that has not been removed.
        """
        pins: dict[Node, int] = {}
        for leaf in pinned:
            here: Node | None = leaf
            while here is not None:
                pins[here] = pins.get(here, 0) + 1
                here = here.parent
        place = {node: i for i, node in enumerate(self._unpinned)}
        evictable = held = 0
        found = set()
        for node in self.nodes():
            found.add(node)
            if node.pins != pins.get(node, 0):
                raise AssertionError(f"{node} should have {pins.get(node, 0)} pins")
            if (node in place) != (not node.pins and node.parent is not None):
                raise AssertionError(f"{node} is wrongly in or out of the eviction order")
            if len(node.key) != len(node.blocks) * self._block_bytes:
                raise AssertionError(f"{node} has {len(node.key)} bytes of key")
            if len(node.blocks) > MOST_BLOCKS:
                raise AssertionError(f"{node} has {len(node.blocks)} blocks")
            if len(node.digests) > len(node.blocks):
                raise AssertionError(f"{node} has digests of blocks that it has not")
            if node.parent is not None and not node.blocks:
                raise AssertionError(f"{node} is empty")
            if node.pins:
                held += len(node.blocks)
            else:
                evictable += len(node.blocks)
            for first, child in node.children.items():
                if child.parent is not node or child.key[: self._block_bytes] != first:
                    raise AssertionError(f"{child} hangs in the wrong place")
                if not node.pins and node in place and place[child] > place[node]:
                    raise AssertionError(f"{node} would be evicted before its child")
        if not found >= pins.keys() or not found >= place.keys():
            raise AssertionError("a node in use is not in the tree")
        if (held, evictable) != (self.pinned, self.evictable):
            raise AssertionError(f"{held} + {evictable} blocks are not {self.pinned} + ...")
