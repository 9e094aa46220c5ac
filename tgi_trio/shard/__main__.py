"""`python -m tgi_trio.shard <channel spec> <settings as JSON>`: one shard process.

Started by the router; the channel spec is `ipc.channel.ChannelSpec.text()`, its descriptors are
inherited.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.errors import ConfigurationError
from tgi_trio.shard import process
from tgi_trio.shard.group import Followers, GroupRunner
from tgi_trio.shard.step import Runner

if TYPE_CHECKING:
    from tgi_trio.shard.models.decoder import Ranks


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
    followers: tuple[str, ...] = ()  # rank 0 of several: the channel specs of the others
    rendezvous: int = -1  # with several ranks: descriptor of the file they meet at
    tokenizer_path: str | None = None  # tokenizer.json; None: grammars are refused

    @property
    def device_of_rank(self) -> str:
        """The device of this rank: its own of a machine's several."""
        if self.device == "cuda" and self.world_size > 1:
            return f"cuda:{self.rank}"
        return self.device

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

    if settings.world_size > 1:
        return _serve_rank(argv[0], settings)
    return _serve(argv[0], settings, lambda: load(settings))


def load(settings: ShardSettings, ranks: Ranks | None = None) -> Runner:
    """Return the model, or this rank's part of it; raises as `load_runner` does."""
    # torch comes in here, after the router has been told that this process lives.
    from tgi_trio.shard.backend import load_runner

    return load_runner(
        Path(settings.model_path),
        dtype=settings.dtype,
        device=settings.device_of_rank,
        ranks=ranks,
        threads=settings.threads or None,
        cpu_backend=settings.cpu_backend,
        tokenizer=None if settings.tokenizer_path is None else Path(settings.tokenizer_path),
    )


def _serve(spec: str, settings: ShardSettings, factory: Callable[[], Runner]) -> int:
    return process.serve(
        spec,
        factory,
        world_size=settings.world_size,
        spin_us=settings.spin_us,
        speculate=settings.speculate,
    )


def _serve_rank(spec: str, settings: ShardSettings) -> int:
    """Serve as one of several ranks; rank 0 takes the others along and dismisses them."""
    with ExitStack() as at_end:

        def factory() -> Runner:
            followers = None
            if settings.rank == 0:
                followers = Followers.attach(settings.followers)
                followers.greet()
                at_end.callback(followers.dismiss)
            import torch

            from tgi_trio.shard.distributed import ProcessGroup

            device = torch.device(settings.device_of_rank)
            ranks = ProcessGroup.connect(
                settings.rendezvous, settings.rank, settings.world_size, device
            )
            runner = load(settings, ranks)
            return runner if followers is None else GroupRunner(runner, followers)

        return _serve(spec, settings, factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
