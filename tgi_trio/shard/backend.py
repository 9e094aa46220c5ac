"""Which runner serves a model: the CPU kernels where they fit, torch everywhere else."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.shard.model_config import read_config
from tgi_trio.shard.model_runner import TorchRunner, resolve_dtype
from tgi_trio.shard.models.families import decoder_spec
from tgi_trio.shard.sampler import RowSampler, Sampler
from tgi_trio.shard.step import Runner

log = logging.getLogger(__name__)


def load_runner(
    folder: Path,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    rank: int = 0,
    world_size: int = 1,
    threads: int | None = None,
    cpu_backend: str = "auto",
    sampler: RowSampler | None = None,
) -> Runner:
    """Load a folder as written by `save_pretrained`.

    `cpu_backend`: "numba", "torch", or "auto" for numba where it fits. Raises ModelLoadError for
    files that cannot be used, ConfigurationError for settings that cannot.
    """
    if device == "cpu" and world_size == 1 and cpu_backend != "torch":
        from tgi_trio.shard.cpu.load import UnfitError, load

        config = read_config(folder)
        kind = str(resolve_dtype(dtype, config, torch.device(device))).removeprefix("torch.")
        own = sampler or Sampler(config.vocab_size, config.eos_ids, torch.device(device))
        try:
            return load(config, decoder_spec(config), dtype=kind, sampler=own, threads=threads)
        except UnfitError as error:
            if cpu_backend == "numba":
                raise ConfigurationError(
                    f"--cpu-backend numba cannot serve this model: {error}. Leave the flag out to "
                    "serve it with torch."
                ) from error
            log.warning("served with torch, not with the CPU kernels: %s", error)
    return TorchRunner.load(
        folder,
        dtype=dtype,
        device=device,
        rank=rank,
        world_size=world_size,
        threads=threads,
        sampler=sampler,
    )
