"""The settings of a shard process, which the router passes on its command line.

They are the options from flags (`ShardOptions`), and beside them what the router decides for a
shard, such as its rank.
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
    max_loaded_adapters: int = 32  # adapters in memory at a time
    # what they may change, as `AdapterScope.words` says it
    adapter_scope: tuple[str, ...] = ("experts", "head", "gains", "tokens", "lookups", "latents")
    image_arena: int = -1  # rank 0: descriptor of the arena of images; -1: no images
    # The largest image that may come, with its image processor (`shard.media.largest` parses it).
    largest_image: str = ""
    longest_sound: str = ""  # likewise, with its feature extractor; "": none is heard
    # Several ranks: descriptor of the file at which they meet. Over several machines: rank 0's
    # listening socket, whose address `meeting` (host:port) all ranks get.
    rendezvous: int = -1
    meeting: str = ""
    frames: str = ""  # spec of the connection for this rank's frames; "": its rings carry them
    local_rank: int = 0  # among the ranks of its machine, which divide its devices
    local_size: int = 0  # number of ranks on its machine; 0: all ranks

    @property
    def place_on_machine(self) -> tuple[int, int]:
        """This rank's place among the ranks of its machine, and their number."""
        if self.local_size:
            return self.local_rank, self.local_size
        return self.rank, self.world_size

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
        """Parse what `text()` returns. Raises ConfigurationError."""
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
    """Return a JSON value as the field's type: JSON has neither tuples nor paths."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    return value
