"""Which format a checkpoint's weights are in."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import find_announced_format, unread_format
from tgi_trio.shard.checkpoint.container import Container
from tgi_trio.shard.checkpoint.formats.gguf import GgufFormat
from tgi_trio.shard.checkpoint.formats.plain import PlainFormat
from tgi_trio.shard.checkpoint.stored_matrix import WeightFormat

FORMATS: Final[tuple[WeightFormat, ...]] = (GgufFormat(), PlainFormat())


def choose_format(config: ModelConfig, container: Container) -> WeightFormat:
    """Return the format of a checkpoint; raises ModelLoadError where nobody claims it."""
    for known in FORMATS:
        if known.claims(config, container):
            return known
    where, name = find_announced_format(config) or ("nothing else", "of an unknown kind")
    raise unread_format(config, where, name)
