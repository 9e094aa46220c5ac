"""How many tokens the KV cache holds, and how many slots there are for states. No torch here."""

from __future__ import annotations

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest

_MEMORY_SHARE = 0.9  # of what is free after the warm-up
_HOST_LEAST_TOKENS = 65536
_HOST_SEQUENCES = 16
_STATE_SHARE = 0.5  # of what is left for both, at most
_SLOTS_EACH = 2  # of a sequence, see `StateGrant`
_LEAST_SNAPSHOTS = 8
DEFAULT_LENGTH = 4096  # where neither the model nor a flag bounds a sequence


def longest_sequence(request: WarmupRequest, info: ShardInfo) -> int:
    """Return the tokens that the longest sequence may have."""
    return request.max_total_tokens or info.max_positions or DEFAULT_LENGTH


def state_slots(
    request: WarmupRequest, info: ShardInfo, free: int, activation: int, *, adapter: int = 0
) -> int:
    """Return how many slots for states to allocate, slot 0 included; 0 where none are kept.

    Enough for all sequences that may run at a time, and for snapshots of half as many prompts; but
    no more than half of what is left of `free` bytes. The rest as for `kv_tokens`. Raises
    ConfigurationError when not even one sequence fits.
    """
    if not info.state_bytes:
        return 0
    spare = _spare(request, free, activation, adapter)
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


def kv_tokens(
    request: WarmupRequest,
    info: ShardInfo,
    free: int,
    activation: int,
    *,
    host: bool,
    beside: int = 0,
    adapter: int = 0,
    states: int = 0,
) -> tuple[int, int]:
    """Return (KV tokens to allocate, bytes they come from), of `free` bytes in all.

    Never more than `max_batch_total_tokens` where that is given. In a `host`'s memory, which is
    seldom all ours, otherwise enough for sixteen of the longest sequences; in a device's all that
    fits, up to as many of them as may run at a time; so too where a token takes nothing, as in a
    model without attention. `activation`: bytes that the largest step takes; `beside`: bytes that
    another model keeps of every token; `adapter`: bytes of the largest LoRA adapter that may be
    loaded later; `states`: bytes of all slots. Raises ConfigurationError when one longest sequence
    does not fit.
    """
    adapters = request.adapters_to_come * adapter
    spare = max(0, _spare(request, free, activation, adapter) - states)
    each = info.kv_bytes_per_token + beside
    fits = spare // max(1, each)
    longest = longest_sequence(request, info)
    if request.max_batch_total_tokens:
        wanted = request.max_batch_total_tokens
        if wanted > fits:
            raise ConfigurationError(
                _too_small(wanted, fits, spare, info, "--max-batch-total-tokens", adapters)
            )
    elif host and each:
        wanted = min(fits, max(_HOST_SEQUENCES * longest, _HOST_LEAST_TOKENS))
    else:
        wanted = min(fits, max(request.max_batch_size, 1) * longest)
    needed = min(longest, request.max_batch_total_tokens or longest)
    if wanted < needed:
        raise ConfigurationError(
            _too_small(needed, fits, spare, info, "--max-total-tokens", adapters)
        )
    return wanted, spare


def _spare(request: WarmupRequest, free: int, activation: int, adapter: int) -> int:
    largest = max(activation, request.tower_bytes)  # a tower computes between two steps
    return max(0, int(free * _MEMORY_SHARE) - largest - request.adapters_to_come * adapter)


def _too_small(
    wanted: int, fits: int, spare: int, info: ShardInfo, flag: str, adapters: int
) -> str:
    room = (
        f" {adapters >> 20} MiB are kept for adapters that may be loaded: --max-loaded-adapters "
        "and --max-lora-rank say how many, and how large."
    )
    return (
        f"The KV cache would need {wanted} tokens of {info.kv_bytes_per_token} bytes, but the "
        f"{spare >> 20} MiB left hold {fits}; lower {flag}, or use a smaller --dtype."
        + (room if adapters else "")
    )
