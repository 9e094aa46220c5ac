"""Checks of options that do not depend on the model; errors are TGI's where TGI has them."""

from __future__ import annotations

import ipaddress
import re
from itertools import combinations
from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import (
    ACTIVATIONS,
    ADAPTER_TOKENIZERS,
    CPU_BACKENDS,
    DRAFTERS,
    DTYPES,
    KV_CACHE_DTYPES,
    LARGEST_ROPE_FACTOR,
    QUANTIZATIONS,
    ROPE_SCALINGS,
    Options,
)

_AT_LEAST_ONE: Final = (
    "validation_workers",
    "max_concurrent_requests",
    "max_best_of",
    "max_client_batch_size",
    "payload_limit",
    "max_image_fetch_size",
    "max_image_pixels",
    "max_images_per_prompt",
    "max_video_frames",
    "max_video_pixels",
    "max_audio_seconds",
    "max_image_bytes",
    "image_memory",
    "prefix_cache_bytes",
    "max_grammar_bytes",
    "max_grammar_seconds",
    "max_input_tokens",
    "max_input_length",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "step_token_budget",
    "max_queued_tokens",
    "max_lora_rank",
    "max_loaded_adapters",
    "stall_timeout",
    "target_ttft",
    "pipeline_stages",
)
_AT_LEAST_ZERO: Final = (
    "response_store_bytes",
    "max_stop_sequences",
    "max_top_n_tokens",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "target_itl",
    "port",
    "aip_http_port",
    "prometheus_port",
    "graceful_termination_timeout",
    "shutdown_delay",
    "shard_restart_limit",
    "spin_us",
    "remote_ranks",
    "speculate",
    "cpu_threads",
    "feature_memory",
    "prefix_cache_host_bytes",
    "prefix_cache_save_seconds",
)

_EVERYWHERE: Final = frozenset(("0.0.0.0", "[::]"))  # hosts that are all of their family
LARGEST_DELTA: Final = 1e6  # a thousandth of it excludes all other tokens; float32 holds the sums


def check(options: Options) -> None:
    """Raise ConfigurationError for options that are wrong for any model."""
    number_of_shards(options)
    for name in _AT_LEAST_ONE:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"`{name}` must be > 0. Given: {value}")
    for name in _AT_LEAST_ZERO:
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigurationError(f"`{name}` must be >= 0. Given: {value}")
    for name in ("port", "aip_http_port", "prometheus_port"):
        port = getattr(options, name)
        if port is not None and port > 65535:
            raise ConfigurationError(f"`{name}` must be <= 65535. Given: {port}")
    if not 0 < options.cuda_memory_fraction <= 1:
        raise ConfigurationError(
            f"`cuda_memory_fraction` must be > 0 and <= 1. Given: {options.cuda_memory_fraction}"
        )
    _check_watermark(options)
    try:
        ipaddress.ip_address(options.hostname)
    except ValueError:
        raise ConfigurationError(
            f"`hostname` must be an IP address such as 127.0.0.1. Given: {options.hostname}"
        ) from None
    if options.adapter_tokenizers not in ADAPTER_TOKENIZERS:
        raise ConfigurationError(
            f"`adapter_tokenizers` must be one of {', '.join(ADAPTER_TOKENIZERS)}. "
            f"Given: {options.adapter_tokenizers}"
        )
    if options.cpu_backend not in CPU_BACKENDS:
        raise ConfigurationError(
            f"`cpu_backend` must be one of {', '.join(CPU_BACKENDS)}. Given: {options.cpu_backend}"
        )
    if re.fullmatch("[a-z]+", options.device) is None:
        raise ConfigurationError(
            f"`device` must be auto, cpu, or what torch calls a kind of device, such as cuda. "
            f"Given: {options.device}"
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigurationError(
            f"`dtype` must be one of {', '.join(DTYPES)}. Given: {options.dtype}"
        )
    _check_places(options)
    _check_rope(options)
    _check_adapters(options)
    _check_stages(options)
    _check_prefixes(options)
    _check_quantize(options)
    _check_drafter(options)
    if options.activations not in (None, *ACTIVATIONS):
        raise ConfigurationError(f"`activations` must be 8 or 16. Given: {options.activations}")
    if options.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
        raise ConfigurationError(
            f"`kv_cache_dtype` must be one of {', '.join(KV_CACHE_DTYPES)}. "
            f"Given: {options.kv_cache_dtype}"
        )


def _check_places(options: Options) -> None:
    """Raise for two addresses of which the second could not be bound because of the first."""
    flag = "port" if options.aip_http_port is None else "aip_http_port"
    places = [("bind" if options.bind else flag, each) for each in options.addresses]
    places += [("prometheus_port", each) for each in options.metrics_addresses]
    places += [("rank_address", each) for each in options.rank_addresses]
    for (one, first), (other, second) in combinations(places, 2):
        if not _overlap(first, second):
            continue
        if one == other:
            raise ConfigurationError(f"`{one}` names {first} and {second}: leave one of them out")
        raise ConfigurationError(
            f"`{other}` asks for {second} and `{one}` for {first}: choose another for one of them"
        )


def _overlap(one: str, other: str) -> bool:
    """Return whether two addresses exclude each other; of port 0 each gets one of its own."""
    (host, _, port), (second, _, same) = one.rpartition(":"), other.rpartition(":")
    everywhere = {host, second} & _EVERYWHERE and (host[:1] == "[") == (second[:1] == "[")
    return port == same != "0" and (host == second or bool(everywhere))


def _check_watermark(options: Options) -> None:
    if not 0 < options.watermark_gamma < 1:
        raise ConfigurationError(
            f"`watermark_gamma` must be > 0 and < 1. Given: {options.watermark_gamma}"
        )
    if not abs(options.watermark_delta) <= LARGEST_DELTA:
        raise ConfigurationError(
            f"`watermark_delta` must be >= -{LARGEST_DELTA:g} and <= {LARGEST_DELTA:g}. "
            f"Given: {options.watermark_delta}"
        )


def _check_adapters(options: Options) -> None:
    names = [re.split("[=@]", entry)[0] for entry in options.lora_adapters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"`lora_adapters` names {', '.join(twice)} twice")


def _check_rope(options: Options) -> None:
    if options.rope_scaling is not None and options.rope_scaling not in ROPE_SCALINGS:
        raise ConfigurationError(
            f"`rope_scaling` must be one of {', '.join(ROPE_SCALINGS)}. "
            f"Given: {options.rope_scaling}"
        )
    if options.rope_factor is not None and not 1 <= options.rope_factor <= LARGEST_ROPE_FACTOR:
        raise ConfigurationError(
            f"`rope_factor` must be >= 1 and <= {LARGEST_ROPE_FACTOR}. Given: {options.rope_factor}"
        )


def _check_prefixes(options: Options) -> None:
    if options.prefix_cache_host_bytes and not options.prefix_caching:
        raise ConfigurationError(
            "`prefix_cache_host_bytes` does not go with `prefix_caching` off: nothing is evicted"
        )
    if options.prefix_cache_path is None:
        return
    if not options.prefix_caching:
        raise ConfigurationError(
            "`prefix_cache_path` does not go with `prefix_caching` off: nothing is to be kept"
        )
    if options.ranks_elsewhere:
        raise ConfigurationError(
            "`prefix_cache_path` does not go with ranks on other machines (`shard`, "
            "`remote_ranks`): its files are of this one"
        )


def _check_stages(options: Options) -> None:
    stages, ranks = options.pipeline_stages, number_of_shards(options)
    if stages == 1:
        return
    if ranks % stages:
        raise ConfigurationError(
            "`pipeline_stages` must divide `num_shard`: each stage has as many ranks. "
            f"Given: {stages} of {ranks}"
        )
    if options.speculate or options.draft_model is not None:
        raise ConfigurationError(
            "`pipeline_stages` does not go with drafts: leave out `speculate` and `draft_model`"
        )
    if options.lora_adapters or options.adapter_updates:
        raise ConfigurationError(
            "`pipeline_stages` does not go with adapters: leave out `lora_adapters` and "
            "`adapter_updates`"
        )


def _check_drafter(options: Options) -> None:
    if options.drafter is None:
        return
    if options.drafter not in DRAFTERS:
        raise ConfigurationError(
            f"`drafter` must be one of {', '.join(DRAFTERS)}; heads and smaller models are named "
            f"as `draft_model`. Given: {options.drafter}"
        )
    if options.draft_model is not None:
        raise ConfigurationError(
            f"`drafter` {options.drafter} and the `draft_model` {options.draft_model} cannot both "
            "draft: leave one of them out"
        )


def _check_quantize(options: Options) -> None:
    if options.quantize is None:
        return
    if options.quantize not in QUANTIZATIONS:
        raise ConfigurationError(
            f"`quantize` must be one of {', '.join(QUANTIZATIONS)}. Given: {options.quantize}"
        )


def number_of_shards(options: Options) -> int:
    """Return the number of ranks, by TGI's rules for `sharded` and `num_shard`."""
    count = options.num_shard
    if options.sharded and count is not None and count <= 1:
        raise ConfigurationError("`sharded` is true but `num_shard` <= 1")
    if count is not None and count < 1:
        raise ConfigurationError("`num_shard` cannot be < 1")
    if options.sharded and count is None:
        raise ConfigurationError("`sharded` is true: say over how many ranks with `num_shard`")
    return count or 1
