"""`python -m tgi_trio.shard <channel spec> <settings as JSON>`: one shard process.

Started by the router; the channel spec is `ipc.channel.ChannelSpec.text()`, its descriptors are
inherited.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.config import RopeScaling
from tgi_trio.shard import process
from tgi_trio.shard.checkpoint.readahead import reading_ahead
from tgi_trio.shard.contract import Runner
from tgi_trio.shard.machine.cores import sensible_threads, usable_cores
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.machine.openmp import openmp_settings
from tgi_trio.shard.ranks.leader import Followers, GroupRunner

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.models.decoder import Ranks


@dataclass(frozen=True)
class ShardSettings:
    """What the router decides for a shard before it starts."""

    model_path: str  # folder as written by save_pretrained
    dtype: str | None = None  # None: the checkpoint's own
    device: str = "auto"  # "cpu", "cuda", or "auto": CUDA where torch sees a device
    rank: int = 0
    world_size: int = 1
    spin_us: int | None = None  # None: as the channel says
    threads: int = 0  # 0: as many as the model's size is worth
    quantize: str | None = None  # "eetq": 8-bit weights, by the CPU kernels
    rope: tuple[str, float] | None = None  # rotary scaling: its kind and factor
    cpu_backend: str = "auto"  # "numba", "torch", or "auto": numba where it fits
    cuda_graphs: tuple[int, ...] | None = None  # batch sizes recorded; None: TGI's
    cuda_memory_fraction: float = 1.0  # of a device's memory that is ours
    speculate: int = 0  # tokens guessed ahead per step and sequence at most
    trust_remote_code: bool = False  # a model's own Python code may be run
    followers: tuple[str, ...] = ()  # rank 0 of several: the channel specs of the others
    rendezvous: int = -1  # with several ranks: descriptor of the file they meet at
    tokenizer_path: str | None = None  # tokenizer.json; None: grammars are refused
    watermark_gamma: float = 0.5  # see `logits_processors.Watermark`
    watermark_delta: float = 2.0

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


def load(settings: ShardSettings, connect: Callable[[str], Ranks] | None = None) -> Runner:
    """Return the model, or this rank's part of it; raises as `load_runner` and `choose_device` do.

    `connect` meets the other ranks.
    """
    # Rank 0 reads for all. Heavy imports come here, beside the reading and after the router has
    # been told that this process lives.
    folder = Path(settings.model_path)
    ahead = reading_ahead(folder) if settings.rank == 0 else nullcontext(frozenset[Path]())
    with pause_collection(), ahead as fresh_files:
        from tgi_trio.shard.backend import load_runner
        from tgi_trio.shard.machine.device import CPU, choose_device
        from tgi_trio.shard.sampling.logits_processors import Watermark

        device = choose_device(settings.device, settings.rank, settings.world_size)
        if device == CPU and settings.world_size == 1:  # ranks would be bound to the same cores
            _settle_threads(settings)
        return load_runner(
            folder,
            dtype=settings.dtype,
            device=device,
            ranks=None if connect is None else connect(device),
            threads=settings.threads or None,
            quantize=settings.quantize,
            rope=None if settings.rope is None else RopeScaling(*settings.rope),
            cpu_backend=settings.cpu_backend,
            cuda_graphs=None if settings.cuda_graphs is None else tuple(settings.cuda_graphs),
            cuda_memory_fraction=settings.cuda_memory_fraction,
            tokenizer=None if settings.tokenizer_path is None else Path(settings.tokenizer_path),
            watermark=Watermark(settings.watermark_gamma, settings.watermark_delta),
            fresh_files=fresh_files,
            trust_remote_code=settings.trust_remote_code,
        )


def _settle_threads(settings: ShardSettings) -> None:
    """Say how many threads torch has, how they wait and where they run."""
    cores = usable_cores()
    count = settings.threads or sensible_threads(Path(settings.model_path), len(cores))
    os.environ.update(openmp_settings(count, cores, os.environ))


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

    def connect(device: str) -> Ranks:
        import torch

        from tgi_trio.shard.ranks.distributed import ProcessGroup

        where = torch.device(device)
        return ProcessGroup.connect(settings.rendezvous, settings.rank, settings.world_size, where)

    with ExitStack() as at_end:

        def factory() -> Runner:
            followers = None
            if settings.rank == 0:
                followers = Followers.attach(settings.followers)
                followers.greet()
                at_end.callback(followers.dismiss)
            runner = load(settings, connect)
            return runner if followers is None else GroupRunner(runner, followers)

        return _serve(spec, settings, factory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
