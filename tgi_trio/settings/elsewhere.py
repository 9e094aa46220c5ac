"""Checks of options when ranks run on other machines than the router."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.checks import number_of_shards
from tgi_trio.settings.records import Options

# Flags that need the router and its shard on one machine, and why.
_PIXELS: Final = "pixels of images reach a shard through memory of its own machine"
_OF_ONE_MACHINE: Final = {
    "spin_us": "it is for readers of memory that router and shard share",
    **dict.fromkeys(
        (
            "image_urls",
            "max_image_fetch_size",
            "max_image_pixels",
            "max_images_per_prompt",
            "max_video_frames",
            "max_video_pixels",
            "max_audio_seconds",
            "max_image_bytes",
            "image_memory",
            "feature_memory",
        ),
        _PIXELS,
    ),
}


def check_ranks_elsewhere(options: Options) -> None:
    """Raise ConfigurationError if ranks on other machines do not go with the options."""
    flag = "shard" if options.shard else "remote_ranks"
    if options.shard:
        _check_shards(options)
    count, size = options.ranks_elsewhere, number_of_shards(options)
    if count >= size and (count, size) != (1, 1):
        raise ConfigurationError(
            f"`{flag}` must be < `num_shard`, or both 1: rank 0 of several runs here. "
            f"Given: {count} of {size}"
        )
    if count and options.cluster_secret_file is None:
        raise ConfigurationError(
            f"`{flag}` needs `cluster_secret_file`, which the ranks' machines show as well"
        )
    if options.rank_address.startswith("unix:"):
        raise ConfigurationError(
            f"`rank_address` must be host:port or [host]:port. Given: {options.rank_address}"
        )
    if count == size:
        for name, why in _OF_ONE_MACHINE.items():
            if _is_given(options, name):
                raise ConfigurationError(f"`{name}` does not go with `{flag}`: {why}")


def _check_shards(options: Options) -> None:
    for name in ("remote_ranks", "rank_address"):
        if _is_given(options, name):
            raise ConfigurationError(
                f"`{name}` does not go with `shard`: ranks of other machines either call or are "
                "called. Leave one of them out"
            )
    if twice := sorted({each for each in options.shard if options.shard.count(each) > 1}):
        raise ConfigurationError(
            f"`shard` names {', '.join(twice)} twice, and what listens there runs one rank"
        )


def _is_given(options: Options, name: str) -> bool:
    default = next(each.default for each in fields(options) if each.name == name)
    return bool(getattr(options, name) != default)
