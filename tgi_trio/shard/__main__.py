"""`python -m tgi_trio.shard <channel spec> <settings as JSON>`: one shard process.

Started by the router; the channel spec is `ipc.channel.ChannelSpec.text()`, its descriptors are
inherited.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tgi_trio.errors import ConfigurationError
from tgi_trio.shard import process
from tgi_trio.shard.step import Runner


@dataclass(frozen=True)
class ShardSettings:
    """What the router decides for a shard before it starts."""

    model_path: str  # folder as written by save_pretrained
    dtype: str | None = None  # None: the checkpoint's own
    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    spin_us: int | None = None  # None: as the channel says
    threads: int = 0  # 0: as many as the model's size is worth
    cpu_backend: str = "auto"  # "numba", "torch", or "auto": numba where it fits
    speculate: int = 0  # tokens guessed ahead per step and sequence at most
    tokenizer_path: str | None = None  # tokenizer.json; None: grammars are refused

    @classmethod
    def parse(cls, text: str) -> ShardSettings:
        """Read the JSON object on the command line; raises ConfigurationError."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise ConfigurationError(
                f"shard settings {text!r}: {error}. Expected a JSON object with the keys {allowed}."
            ) from error


def main(argv: list[str]) -> int:
    """Run the shard; returns the process's exit code."""
    if len(argv) != 2:
        print("usage: python -m tgi_trio.shard <channel spec> <settings JSON>", file=sys.stderr)
        return 2
    try:
        settings = ShardSettings.parse(argv[1])
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2

    def load() -> Runner:
        # torch comes in here, after the router has been told that this process lives.
        from tgi_trio.shard.backend import load_runner

        return load_runner(
            Path(settings.model_path),
            dtype=settings.dtype,
            device=settings.device,
            rank=settings.rank,
            world_size=settings.world_size,
            threads=settings.threads or None,
            cpu_backend=settings.cpu_backend,
            tokenizer=None if settings.tokenizer_path is None else Path(settings.tokenizer_path),
        )

    return process.serve(
        argv[0],
        load,
        world_size=settings.world_size,
        spin_us=settings.spin_us,
        speculate=settings.speculate,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
