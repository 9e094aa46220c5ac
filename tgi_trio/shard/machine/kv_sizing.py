"""Sizes the KV cache and the number of slots for recurrent states. No torch here.

A server's first shard takes what memory allows. The router plans with that size from then on and
replays sequences after a crash, so later shards need as many blocks, although a machine's free
memory varies. Therefore the first shard leaves a tenth of the free memory, of which later ones may
take half. A driver may also free a dead process's memory only after a while, which is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest

_SHARE: Final = 0.9  # of what is free after the warm-up
_SHARE_AGAIN: Final = 0.95  # the same, for later shards of a server
_LOOKS, _LOOK_S = 40, 0.25  # how often missing memory is checked for again, and the interval
_HOST_LEAST_TOKENS = 65536
_HOST_SEQUENCES = 16
_STATE_SHARE = 0.5  # largest share of states in the memory for states and KV
_SLOTS_EACH = 2  # per sequence, see `StateGrant`
_LEAST_SNAPSHOTS = 8
DEFAULT_LENGTH = 4096  # of a sequence, if neither the model nor a flag limits it


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The memory that a shard has for sequences."""

    blocks: int  # of K and V, block 0 included, which is never handed out
    state_slots: int  # slot 0 included, which is never handed out; 0: the model keeps none
    spare: int  # bytes that K and V come from


def longest_sequence(request: WarmupRequest, info: ShardInfo) -> int:
    """Return the number of tokens of the longest allowed sequence."""
    return request.max_total_tokens or info.max_positions or DEFAULT_LENGTH


def size_cache(
    request: WarmupRequest,
    info: ShardInfo,
    measure_free: Callable[[], int],
    activation: int,
    *,
    host: bool,
    beside: int = 0,
    adapter: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> CacheSize:
    """Return how much of the free bytes (`measure_free`) is taken for sequences.

    A later shard of a server takes as many blocks and slots as the first one has found. The first
    takes at most `max_batch_total_tokens` tokens, rounded up to whole blocks, if that is given. In
    a `host`'s memory, which other programs use too, it takes enough for sixteen of the longest
    sequences. On a device, or if a token takes no memory (a model without attention), it takes all
    that fits, up to the longest sequence times the largest batch. There are slots for the states
    of as many sequences as may run at once, and for snapshots of half as many prompts, in at most
    half of the memory.

    `activation`: bytes that the largest step takes; `beside`: bytes per token that another model
    keeps; `adapter`: bytes of the largest LoRA adapter that may be loaded later. Raises
    ConfigurationError if not even one longest sequence fits, or less than the first shard had.
    """
    each = info.kv_bytes_per_token + beside
    if request.blocks:
        return _size_again(request, info, measure_free, activation, each, adapter, sleep)
    spare = _spare(request, measure_free(), activation, adapter, _SHARE)
    slots = _state_slots(request, info, spare)
    spare = max(0, spare - slots * info.state_bytes)
    block = info.block_size * each
    fits = spare // max(1, block)
    wanted = _whole(_wanted_tokens(request, info, host=host and each > 0), info)
    longest = longest_sequence(request, info)
    needed = _whole(min(longest, request.max_batch_total_tokens or longest), info)
    asked = request.max_batch_total_tokens > 0
    blocks = wanted if asked else min(wanted, fits)
    if blocks > fits or blocks < needed:
        flag = "--max-batch-total-tokens" if blocks > fits else "--max-total-tokens"
        tokens = max(blocks, needed) * info.block_size
        raise ConfigurationError(
            f"The KV cache would need {tokens} tokens of {_told(fits, spare, info)}; lower "
            f"{flag}, or use a smaller --dtype." + _told_of_adapters(request, adapter)
        )
    return CacheSize(1 + blocks, slots, spare)


def _size_again(
    request: WarmupRequest,
    info: ShardInfo,
    measure_free: Callable[[], int],
    activation: int,
    each: int,
    adapter: int,
    sleep: Callable[[float], None],
) -> CacheSize:
    """Return the size that the first shard has found, after waiting for missing memory."""
    states = request.state_slots * info.state_bytes
    kv = request.blocks * info.block_size * each
    spare = 0
    for look in range(1 + _LOOKS):
        if look:
            sleep(_LOOK_S)
        spare = _spare(request, measure_free(), activation, adapter, _SHARE_AGAIN) - states
        if kv <= spare:
            return CacheSize(request.blocks, request.state_slots, spare)
    tokens = (request.blocks - 1) * info.block_size
    fits = max(0, spare) // max(1, info.block_size * each)
    raise ConfigurationError(
        f"The KV cache had {tokens} tokens when the server started, and something else has taken "
        f"memory since: it would need {tokens} tokens of {_told(fits, max(0, spare), info)}; free "
        "what was taken, or start the server with a lower --max-batch-total-tokens."
        + _told_of_adapters(request, adapter)
    )


def _state_slots(request: WarmupRequest, info: ShardInfo, spare: int) -> int:
    """Return how many slots for states to allocate, slot 0 included; 0 without states."""
    if not info.state_bytes:
        return 0
    rows = max(1, request.max_batch_size)
    wanted = 1 + _SLOTS_EACH * rows + max(_LEAST_SNAPSHOTS, rows // 2)
    fits = int(spare * _STATE_SHARE) // info.state_bytes
    if fits < 1 + _SLOTS_EACH:
        raise ConfigurationError(
            f"The states of one sequence would need {1 + _SLOTS_EACH} slots of "
            f"{info.state_bytes} bytes, but half of the {spare >> 20} MiB left holds {fits}; lower "
            "--max-batch-prefill-tokens, or use a smaller --dtype."
        )
    return min(wanted, fits)


def _wanted_tokens(request: WarmupRequest, info: ShardInfo, *, host: bool) -> int:
    """Return the number of tokens that the KV cache should hold if there is enough memory."""
    if request.max_batch_total_tokens:
        return request.max_batch_total_tokens
    longest = longest_sequence(request, info)
    if host:
        return max(_HOST_SEQUENCES * longest, _HOST_LEAST_TOKENS)
    return max(request.max_batch_size, 1) * longest


def _whole(tokens: int, info: ShardInfo) -> int:
    """Return the number of blocks for so many tokens."""
    return -(-tokens // info.block_size)


def _spare(request: WarmupRequest, free: int, activation: int, adapter: int, share: float) -> int:
    """Return the number of bytes that may be used for sequences."""
    largest = max(activation, request.tower_bytes)  # a vision tower computes between two steps
    return max(0, int(free * share) - largest - request.adapters_to_come * adapter)


def _told(fits: int, spare: int, info: ShardInfo) -> str:
    """Return what a token takes beside what there is; `fits`: blocks."""
    return (
        f"{info.kv_bytes_per_token} bytes, but the {spare >> 20} MiB left hold "
        f"{fits * info.block_size}"
    )


def _told_of_adapters(request: WarmupRequest, adapter: int) -> str:
    if not (kept := request.adapters_to_come * adapter):
        return ""
    return (
        f" {kept >> 20} MiB are kept for adapters that may be loaded: --max-loaded-adapters and "
        "--max-lora-rank say how many, and how large."
    )
