"""Which runner serves a model: the CPU kernels where they fit, torch everywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.shard.device import graph_sizes, limit_memory
from tgi_trio.shard.follower import NoSampler
from tgi_trio.shard.model_config import read_config
from tgi_trio.shard.model_runner import TorchRunner, load_grammars, resolve_dtype
from tgi_trio.shard.models.decoder import Ranks
from tgi_trio.shard.models.families import decoder_spec
from tgi_trio.shard.sampler import Sampler
from tgi_trio.shard.sampling import RowSampler
from tgi_trio.shard.step import Runner


def load_runner(
    folder: Path,
    *,
    dtype: str | None = None,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
    threads: int | None = None,
    cpu_backend: str = "auto",
    cuda_graphs: tuple[int, ...] | None = None,
    cuda_memory_fraction: float = 1.0,
    tokenizer: Path | None = None,
) -> Runner:
    """Load a folder as written by `save_pretrained`.

    `cpu_backend`: "numba", "torch", or "auto" for numba where it fits, which is on one rank only.
    `cuda_graphs`: see `TorchRunner.load`; None for those that TGI records. With `ranks`, this
    rank's part is loaded; rank 0 alone chooses tokens. The rest as for `TorchRunner.load`. Raises
    ModelLoadError for files that cannot be used, ConfigurationError for settings that cannot.
    """
    config, where = read_config(folder), device or torch.device("cpu")
    limit_memory(where, cuda_memory_fraction)
    sizes = graph_sizes(where, cuda_graphs)
    chooses = ranks is None or ranks.rank == 0
    grammars = load_grammars(tokenizer, config) if chooses else None
    if ranks is not None and cpu_backend == "numba":
        raise ConfigurationError(
            "The CPU kernels compute a model on one rank; leave --cpu-backend out, or use "
            "--num-shard 1."
        )
    if where.type == "cpu" and ranks is None and cpu_backend != "torch":
        # numba and the kernels are imported only where they may serve.
        from tgi_trio.shard.cpu.load import UnfitError, load

        kind = str(resolve_dtype(dtype, config, where)).removeprefix("torch.")
        try:
            runner = load(
                config, decoder_spec(config), dtype=kind, grammars=grammars, threads=threads
            )
            # What torch still does is small, and its own team would go on spinning on our cores.
            torch.set_num_threads(1)
            return runner
        except UnfitError as error:
            if cpu_backend == "numba":
                raise ConfigurationError(
                    f"The CPU kernels cannot serve this model: {error}. Leave --cpu-backend out to "
                    "serve it with torch."
                ) from error
            print(f"served with torch, not with the CPU kernels: {error}", file=sys.stderr)
    sampler: RowSampler = NoSampler()
    if chooses:
        sampler = Sampler(config.vocab_size, config.eos_ids, where, grammars=grammars)
    return TorchRunner.load(
        folder,
        dtype=dtype,
        device=str(where),
        ranks=ranks,
        threads=threads,
        sampler=sampler,
        cuda_graphs=sizes,
    )
