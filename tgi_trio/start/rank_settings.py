"""The settings of a server's ranks: those of the server, and what its model and adapters need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.images import ImageArena
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.adapters.needs import AdapterNeeds, find_needs
from tgi_trio.model.adapters.sites import EVERYTHING, NOTHING
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.router.media.media_model import MediaModel
from tgi_trio.settings.records import Settings


def find_rank_settings(
    settings: Settings,
    config: ModelConfig,
    tokenizer: Path,
    arena: ImageArena | None = None,
    images: MediaModel | None = None,
) -> ShardSettings:
    """Return the settings of every rank, without its number in the group.

    `config`: the model's; `tokenizer`: the tokenizer.json for which grammars are compiled;
    `arena`: of images' pixels; `images`: how the model takes images, if they are served.
    """
    largest = longest = ""
    if images is not None:
        largest = images.describe_largest(settings.max_image_pixels, settings.max_input_tokens)
        longest = images.describe_longest(settings.max_audio_seconds)
    own = () if images is None else tuple(images.adapters.values())
    needs = _find_needs(settings, config, own)
    return ShardSettings.of(
        settings,
        model_path=settings.model_path,
        dtype=settings.dtype,
        tokenizer_file=None if settings.disable_grammar_support else tokenizer,
        world_size=settings.num_shard,
        max_lora_rank=needs.rank,
        max_loaded_adapters=_most_adapters(settings) + len(own),
        adapter_scope=needs.scope.words(),
        image_arena=-1 if arena is None else arena.fd,
        largest_image=largest,
        longest_sound=longest,
    )


def _find_needs(settings: Settings, config: ModelConfig, own: Sequence[Path]) -> AdapterNeeds:
    """Return what a shard needs to have room for beside the model; `own`: its own adapters."""
    if not settings.serves_adapters and not own:
        return AdapterNeeds(0, NOTHING)
    folders = map(Path, settings.adapter_folders.values())
    grows, rank = settings.adapter_updates, settings.max_lora_rank
    try:
        spec = decoder_spec(config)
        if spec is not None:
            return find_needs(folders, spec, rank, grows=grows, own=own)
    except ModelLoadError:  # the shard will refuse it, and say why
        pass
    return AdapterNeeds(rank, EVERYTHING)


def _most_adapters(settings: Settings) -> int:
    """Return how many adapters a shard has in memory at most."""
    if settings.adapter_updates:
        return settings.max_loaded_adapters
    return min(settings.max_loaded_adapters, len(settings.lora_adapters))
