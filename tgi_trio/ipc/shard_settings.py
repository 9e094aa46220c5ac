"""What one shard process is told on its command line: one record, written by the router, read here.

The options of the shard's flags travel whole (`ShardOptions`); what the router decides for a shard,
and its place in the group, stand beside them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import ShardOptions


@dataclass(frozen=True, kw_only=True)
class ShardSettings(ShardOptions):
    """Everything a shard process is told before it starts."""

    model_path: Path  # folder as written by save_pretrained
    dtype: str | None = None  # None: the checkpoint's own
    tokenizer_file: Path | None = None  # tokenizer.json; None: grammars are refused
    rank: int = 0
    world_size: int = 1
    followers: tuple[str, ...] = ()  # rank 0 of several: the channel specs of the others
    max_lora_rank: int = 0  # of adapters; 0: none are ever loaded
    max_loaded_adapters: int = 32  # of those, at a time
    image_arena: int = -1  # descriptor of the arena of images, for rank 0; -1: it computes none
    # The largest image that may come, and what makes its pixels (`shard.images.largest` reads it).
    largest_image: str = ""
    # With several ranks: descriptor of the file they meet at; over several machines rank 0's of the
    # socket at which it listens, and `meeting` is that one's address, host:port, for all of them.
    rendezvous: int = -1
    meeting: str = ""
    frames: str = ""  # spec of the connection that this rank's frames take; "": they take its rings
    local_rank: int = 0  # among those of its machine, which share out its devices
    local_size: int = 0  # how many those are; 0: all are here

    @classmethod
    def of(cls, options: ShardOptions, *, model_path: Path, **decided: Any) -> ShardSettings:
        """Return settings with all of `options`; `decided`: the other fields, by name."""
        given = {each.name: getattr(options, each.name) for each in fields(ShardOptions)}
        return cls(**given, model_path=model_path, **decided)

    def text(self) -> str:
        """Return the settings as one word of a command line: a JSON object."""
        return json.dumps(
            {each.name: getattr(self, each.name) for each in fields(self)}, default=str
        )

    @classmethod
    def parse(cls, text: str) -> ShardSettings:
        """Read `text()` back; raises ConfigurationError unless it is an object of our fields."""
        hints = get_type_hints(cls)
        try:
            values = dict(json.loads(text))
            return cls(**{name: _restore(hints.get(name), each) for name, each in values.items()})
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"shard settings {text!r}: {error}. Expected a JSON object with the keys "
                f"{', '.join(each.name for each in fields(cls))}."
            ) from error


def _restore(hint: Any, value: Any) -> Any:
    """Return a JSON value as the type that a field has: JSON knows neither tuples nor paths."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    return value
