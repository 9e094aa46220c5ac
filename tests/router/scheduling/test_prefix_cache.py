"""The radix tree: TGI's conformance cases, and its rules in random order."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from tests.router.scheduling.harness import Pair, expected, limits, request
from tests.router.scheduling.model_shard import ModelShard
from tgi_trio.ipc.messages import Fault, SamplingParameters
from tgi_trio.router.scheduling import prefix_cache
from tgi_trio.router.scheduling.prefix_cache import PrefixCache
from tgi_trio.router.scheduling.prefix_nodes import Node

BASE = (0, "")


def key(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


@pytest.fixture(params=[prefix_cache.MOST_BLOCKS, 1, 2])
def most_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of a node: as many as there may be, or so few that every prompt has several nodes."""
    monkeypatch.setattr(prefix_cache, "MOST_BLOCKS", request.param)
    most: int = request.param
    return most


class Tree:
    """A cache filled and asked by token lists; nothing stays pinned between calls."""

    def __init__(self, block_size: int = 1) -> None:
        self.cache = PrefixCache(block_size)
        self.block_size = block_size

    def insert(self, tokens: list[int], blocks: list[int]) -> int:
        """Publish; returns how many tokens had been published before."""
        match = self.cache.match(BASE, b"", 0)
        root = self.cache.pin(BASE, match)
        node, spare = self.cache.insert(root, key(tokens), blocks)
        self.cache.unpin(node)
        self.cache.check([])
        return len(spare) * self.block_size

    def find(self, tokens: list[int]) -> list[int]:
        """Return the blocks of the longest prefix, and use it once."""
        match = self.cache.match(BASE, key(tokens), len(tokens) // self.block_size)
        self.cache.unpin(self.cache.pin(BASE, match))
        self.cache.check([])
        return match.blocks


def test_insert_tells_what_is_there_already() -> None:
    tree = Tree()
    for tokens, known in [
        ([0, 1, 2], 0),
        ([0, 1, 2], 3),
        ([1, 2, 3], 0),
        ([0, 1, 2, 3, 4], 3),
        ([0, 1, 2, 3, 5, 6, 7], 4),
    ]:
        assert tree.insert(tokens, list(tokens)) == known


def test_insert_in_blocks_of_two() -> None:
    tree = Tree(2)
    assert tree.insert([0, 1, 2, 3], [0, 1]) == 0
    assert tree.insert([0, 1, 2, 3], [0, 1]) == 4
    assert tree.insert([1, 2, 3, 4], [0, 1]) == 0
    assert tree.insert([0, 1, 2, 3, 4, 5], [0, 1, 2]) == 4
    assert tree.insert([0, 1, 3, 4, 5, 6, 7, 8], [0, 3, 4, 5]) == 2


def test_find_the_longest_prefix() -> None:
    tree = Tree()
    for tokens in ([0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7]):
        tree.insert(tokens, tokens)
    for tokens in ([0], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5]):
        assert tree.find(tokens) == tokens
    assert tree.find([0, 1, 3, 4]) == [0, 1]
    assert tree.find([9]) == []


def test_the_least_recently_used_is_evicted_first_and_from_its_end() -> None:
    tree = Tree()
    for tokens in ([0, 1, 2], [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 4], [1, 2, 3]):
        tree.insert(tokens, tokens)
    assert tree.cache.evict(1) == [7]
    assert tree.find([0, 1, 2, 3, 5, 6, 7]) == [0, 1, 2, 3, 5, 6]
    tree.find([0, 1, 2, 3, 4])
    tree.find([1, 2, 3])
    assert tree.cache.evict(2) == [5, 6]
    assert tree.find([0, 1, 2, 3, 5, 6, 7]) == [0, 1, 2, 3]
    tree.find([1, 2, 3])
    assert sorted(tree.cache.evict(3)) == [2, 3, 4]
    assert tree.find([0, 1, 2, 3, 4]) == [0, 1]
    assert sorted(tree.cache.evict(10)) == [0, 1, 1, 2, 3]
    assert list(tree.cache.nodes()) == []


def test_nobody_evicts_what_is_pinned() -> None:
    tree = Tree()
    tree.insert([0, 1, 2, 3], [10, 11, 12, 13])
    node = tree.cache.pin(BASE, tree.cache.match(BASE, key([0, 1, 5]), 3))
    assert tree.cache.evict(10) == [12, 13]
    tree.cache.check([node])
    tree.cache.unpin(node)
    assert tree.cache.evict(10) == [10, 11]
    tree.cache.check([])


def test_the_children_of_a_salt_leave_no_root_behind() -> None:
    cache = PrefixCache(1)
    for number in range(100):
        namespace = (0, f"salt {number}")
        node = cache.pin(namespace, cache.match(namespace, key([1]), 1))
        if number % 2:
            node, _ = cache.insert(node, key([1]), [number])
        cache.unpin(node)
    assert cache.evictable == 50
    assert len(cache.evict(50)) == 50
    assert list(cache.nodes()) == []


def test_a_node_has_few_blocks_however_long_its_prompt(most_blocks: int) -> None:
    """What changes a node copies its key: chunks of a long prompt would cost ever more."""
    count = 3 * most_blocks + 1
    cache, tokens = PrefixCache(1), list(range(count))
    chunks = [tokens[:1], tokens[1 : count // 2], tokens[count // 2 :]]
    node = cache.pin(BASE, cache.match(BASE, b"", 0))
    for chunk in chunks:
        node, spare = cache.insert(node, key(chunk), chunk)
        assert spare == []
        cache.check([node])
    assert [len(each.blocks) for each in cache.nodes()] == [0, *3 * [most_blocks], 1]
    assert cache.match(BASE, key(tokens), count).blocks == tokens
    cache.unpin(node)
    cache.check([])
    assert cache.evict(2) == [tokens[-1], tokens[-2]], "from its end"


def test_random_use_keeps_every_rule(most_blocks: int) -> None:
    rng = random.Random(3)
    for block_size in (1, 2, 3):
        cache = PrefixCache(block_size)
        free = list(range(1, 61))
        pins: list[tuple[Node, list[int], int, list[int]]] = []
        for _ in range(4000):
            tokens = [rng.randint(0, 1) for _ in range(block_size * rng.randint(1, 8))]
            count = len(tokens) // block_size
            if rng.random() < 0.5:
                match = cache.match(BASE, key(tokens), count)
                wanted = count - len(match.blocks)
                if wanted <= len(free) + cache.evictable - match.evictable:
                    node = cache.pin(BASE, match)
                    free += cache.evict(wanted - len(free))
                    own = [free.pop() for _ in range(wanted)]
                    assert not set(own) & set(match.blocks)
                    pins.append((node, tokens, len(match.blocks), own))
            elif pins:
                node, tokens, shared, own = pins.pop(rng.randrange(len(pins)))
                node, spare = cache.insert(node, key(tokens[shared * block_size :]), own)
                free += spare
                cache.unpin(node)
            cache.check([pin[0] for pin in pins])
            blocks = [block for node in cache.nodes() for block in node.blocks]
            everything = free + blocks + [b for pin in pins for b in pin[3]]
            assert sorted(everything) == list(range(1, 61))


# -- through the scheduler ---------------------------------------------------------------------


def cached(**changes: Any) -> Pair:
    return Pair(limits(prefix_caching=True, **changes))


def cached_tokens(pair: Pair, id: int) -> int:
    """Return how many prompt tokens of a sequence came from the cache; 0 once it is forgotten."""
    sequence = pair.scheduler.find(id)
    return sequence.cached if sequence else 0


def serve(pair: Pair, id: int, prompt: Any, max_new: int = 4, **changes: Any) -> int:
    """Run one request to its end; returns its cached tokens."""
    pair.scheduler.add(id, request(prompt, max_new, **changes), pair.now)
    pair.step()
    hit = cached_tokens(pair, id)
    pair.run()
    return hit


def test_a_prompt_is_reused_but_for_the_block_of_its_last_token() -> None:
    pair = cached()
    assert serve(pair, 1, 9) == 0
    assert serve(pair, 2, 9) == 8
    assert serve(pair, 3, 8) == 4  # a full hit: something must be computed, in a block of its own
    assert serve(pair, 4, 11) == 8
    for id, length in ((1, 9), (2, 9), (3, 8), (4, 11)):
        assert pair.tokens[id] == expected(length)


def test_a_full_hit_computes_one_token() -> None:
    pair = cached(block_size=1)
    serve(pair, 1, 9)
    assert serve(pair, 2, 9) == 8


def test_generated_tokens_are_reused_in_the_next_turn() -> None:
    pair = cached()
    serve(pair, 1, 6, 10)
    history = [*range(100, 106), *pair.tokens[1]]
    assert len(history) == 16
    assert serve(pair, 2, [*history, 50, 51]) == 12  # the KV of the last token was never computed


def test_a_prompt_is_shared_while_it_runs() -> None:
    pair = cached()
    pair.scheduler.add(1, request(12, 30), 0.0)
    pair.step()
    pair.scheduler.add(2, request(12, 30), 0.0)
    pair.step()
    assert cached_tokens(pair, 2) == 8
    pair.run()
    assert pair.tokens[1] == pair.tokens[2] == expected(12, 30)


def test_requests_that_arrive_together_compute_their_common_prompt_once() -> None:
    pair = cached(token_budget=8)
    for id in range(4):
        pair.scheduler.add(id, request([*range(20), 50 + id, 1, 2], 3), 0.0)
    computed = 0
    while len(pair.finished) < 4:
        pair.send()
        report = pair.shard.step()
        computed += report.prefill_tokens
        pair.commit(report)
    assert computed == 23 + 3 * 3
    for id in range(4):
        assert pair.tokens[id] == expected([*range(20), 50 + id, 1, 2], 3)


def test_those_who_wait_for_a_prefix_do_not_wait_for_a_dead_one() -> None:
    pair = cached(token_budget=8)
    for id in range(3):
        pair.scheduler.add(id, request(20, 3), 0.0)
    pair.step()
    assert list(pair.shard.rows) == [0]
    pair.scheduler.abort(0, pair.now)
    pair.run()
    assert pair.tokens == {1: expected(20, 3), 2: expected(20, 3)}


def test_only_computed_blocks_are_published() -> None:
    pair = cached(token_budget=8)
    pair.scheduler.add(1, request(20, 3), 0.0)
    pair.step()  # 8 of 20 tokens
    pair.scheduler.abort(1, pair.now)
    pair.run()
    assert pair.scheduler.cached_blocks == 2
    assert serve(pair, 2, 20, 3) == 8


def test_isolation_by_salt_and_adapter() -> None:
    pair = cached()
    serve(pair, 1, 9)
    assert serve(pair, 2, 9, cache_salt="mine") == 0
    assert serve(pair, 3, 9, cache_salt="mine") == 8
    adapted = SamplingParameters(ignore_eos=True, adapter=1)
    assert serve(pair, 4, 9, sampling=adapted) == 0
    assert serve(pair, 5, 9, sampling=adapted) == 8


def test_an_unloaded_adapter_leaves_no_prefix_behind() -> None:
    """Of any salt, at once or with the sequences that still use it; others keep theirs."""
    pair = cached()
    serve(pair, 1, 9)
    kept = pair.scheduler.cached_blocks
    adapted = SamplingParameters(ignore_eos=True, adapter=1)
    serve(pair, 2, 9, sampling=adapted)
    serve(pair, 3, [5] * 9, sampling=adapted, cache_salt="mine")
    pair.scheduler.add(4, request(9, sampling=adapted), pair.now)
    pair.step()
    pair.scheduler.abort(4, pair.now)  # the shard may be computing it yet
    pair.scheduler.evict_adapter(1, pair.now)
    pair.scheduler.check()
    assert pair.scheduler.cached_blocks == kept
    pair.run()
    assert pair.scheduler.cached_blocks == kept
    assert pair.scheduler.free_blocks + kept == pair.scheduler.total_blocks
    assert serve(pair, 5, 9) == 8


def test_prompt_logprobs_neither_read_nor_write() -> None:
    pair = cached()
    wanting = SamplingParameters(ignore_eos=True, prompt_logprobs=True)
    assert serve(pair, 1, 9, sampling=wanting) == 0
    assert pair.scheduler.cached_blocks == 0
    serve(pair, 2, 9)
    assert serve(pair, 3, 9, sampling=wanting) == 0


@pytest.mark.parametrize("first", [0, 8])
def test_coming_back_does_not_count_as_cached(first: int) -> None:
    """Who was preempted finds its own tokens in the cache; its prompt was computed all the same."""
    pair = cached(reserve=False, ask_ahead=2, grant_ahead=4, blocks=16)
    if first:
        serve(pair, 1, 9)
    pair.scheduler.add(2, request(list(range(50, 59)), 32), 0.0)
    pair.scheduler.add(3, request(9, 32), 0.0)
    told = set()
    while not {2, 3} <= set(pair.finished):
        pair.step()
        told.add(cached_tokens(pair, 3))
    assert pair.scheduler.counters["preempted"] > 0
    assert pair.scheduler.counters["prefix_hit_tokens"] > first, "it did find something"
    assert told - {0} == ({first} - {0}), "0 only when it has ended and is forgotten"


def test_what_a_lost_shard_had_cached_is_counted_once() -> None:
    pair = cached()
    serve(pair, 1, 9)
    pair.scheduler.add(2, request(9, 6), 0.0)
    pair.step()
    assert cached_tokens(pair, 2) == 8
    assert pair.scheduler.shard_lost(pair.now) == []
    pair.shard = ModelShard(pair.scheduler.limits.block_size)
    pair.step()
    assert cached_tokens(pair, 2) == 8


@pytest.mark.usefixtures("most_blocks")
def test_what_a_failed_sequence_computed_is_not_trusted() -> None:
    pair = cached()
    pair.scheduler.add(1, request(9, 30), 0.0)
    for _ in range(12):
        pair.step()
    del pair.shard.rows[1]
    assert pair.scheduler.fault([Fault(1, "numbers went wrong")], pair.shard.applied, 1.0) == [1]
    pair.scheduler.check()
    assert pair.scheduler.cached_blocks == 0
    assert serve(pair, 2, 9) == 0


@pytest.mark.usefixtures("most_blocks")
def test_what_was_cached_before_a_failure_stays_and_nothing_joins_it() -> None:
    pair = cached()
    serve(pair, 1, 9)
    before = pair.scheduler.cached_blocks
    pair.scheduler.add(2, request([*range(100, 109), 5], 30), 0.0)
    for _ in range(12):
        pair.step()
    del pair.shard.rows[2]
    pair.scheduler.fault([Fault(2, "numbers went wrong")], pair.shard.applied, 1.0)
    pair.scheduler.check()
    assert pair.scheduler.cached_blocks == before
    assert serve(pair, 3, 9) == 8


def test_a_full_cache_gives_way_to_new_requests() -> None:
    pair = cached(blocks=17)
    for id in range(20):
        assert serve(pair, id, [id * 10 + i for i in range(20)], 5) == 0
    assert pair.scheduler.free_blocks + pair.scheduler.cached_blocks == 16
    assert pair.scheduler.cached_blocks > 10
    assert serve(pair, 99, [190 + i for i in range(20)], 5) == 16


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_tokens_do_not_depend_on_the_cache(prefix_caching: bool) -> None:
    rng = random.Random(11)
    pair = Pair(limits(prefix_caching=prefix_caching, blocks=33))
    prompts = [[rng.randint(0, 1) for _ in range(rng.randint(1, 20))] for _ in range(60)]
    for id, prompt in enumerate(prompts):
        pair.scheduler.add(id, request(prompt, 6), 0.0)
    pair.run()
    assert pair.tokens == {id: expected(prompt, 6) for id, prompt in enumerate(prompts)}
