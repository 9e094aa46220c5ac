"""How many tokens the KV cache holds. No torch in this file."""

from __future__ import annotations

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest

_MEMORY_SHARE = 0.9  # of what is free after the warm-up
_HOST_LEAST_TOKENS = 65536
_HOST_SEQUENCES = 16
_DEFAULT_LENGTH = 4096  # where neither the model nor a flag bounds a sequence


def longest_sequence(request: WarmupRequest, info: ShardInfo) -> int:
    """Return the tokens that the longest sequence may have."""
    return request.max_total_tokens or info.max_positions or _DEFAULT_LENGTH


def kv_tokens(
    request: WarmupRequest,
    info: ShardInfo,
    free: int,
    activation: int,
    *,
    host: bool,
    beside: int = 0,
    adapter: int = 0,
) -> tuple[int, int]:
    """Return (KV tokens to allocate, bytes they come from), of `free` bytes in all.

    Never more than `max_batch_total_tokens` where that is given. In a `host`'s memory, which is
    seldom all ours, otherwise enough for sixteen of the longest sequences; in a device's all that
    fits, up to as many of them as may run at a time. `activation`: bytes that the largest step
    takes; `beside`: bytes that another model keeps of every token; `adapter`: bytes of the
    largest LoRA adapter that may be loaded later. Raises ConfigurationError when one longest
    sequence does not fit.
    """
    adapters = request.adapters_to_come * adapter
    spare = max(0, int(free * _MEMORY_SHARE) - activation - adapters)
    fits = spare // (info.kv_bytes_per_token + beside)
    longest = longest_sequence(request, info)
    if request.max_batch_total_tokens:
        wanted = request.max_batch_total_tokens
        if wanted > fits:
            raise ConfigurationError(
                _too_small(wanted, fits, spare, info, "--max-batch-total-tokens", adapters)
            )
    elif host:
        wanted = min(fits, max(_HOST_SEQUENCES * longest, _HOST_LEAST_TOKENS))
    else:
        wanted = min(fits, max(request.max_batch_size, 1) * longest)
    needed = min(longest, request.max_batch_total_tokens or longest)
    if wanted < needed:
        raise ConfigurationError(
            _too_small(needed, fits, spare, info, "--max-total-tokens", adapters)
        )
    return wanted, spare


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
