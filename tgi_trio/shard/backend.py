"""Which runner serves a model: the CPU kernels where they fit, torch everywhere else.

torch takes two seconds to import, numba with the kernels a third of one: either is imported only
where it is to serve.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.errors import ConfigurationError
from tgi_trio.shard.device import CPU, graph_sizes, limit_memory
from tgi_trio.shard.follower import NoSampler
from tgi_trio.shard.model_config import ModelConfig, compute_dtype, read_config
from tgi_trio.shard.models.families import decoder_spec
from tgi_trio.shard.step import Runner

if TYPE_CHECKING:
    from tgi_trio.shard.logits_processors import Grammars
    from tgi_trio.shard.models.decoder import Ranks


def load_runner(
    folder: Path,
    *,
    dtype: str | None = None,
    device: str = CPU,
    ranks: Ranks | None = None,
    threads: int | None = None,
    quantize: str | None = None,
    cpu_backend: str = "auto",
    cuda_graphs: tuple[int, ...] | None = None,
    cuda_memory_fraction: float = 1.0,
    tokenizer: Path | None = None,
    fresh_files: frozenset[Path] = frozenset(),
) -> Runner:
    """Load a folder as written by `save_pretrained`.

    `quantize`: "eetq" for 8-bit weights, which the CPU kernels make; None for those that are there.
    `cpu_backend`: "numba", "torch", or "auto" for numba where it fits, which is on one rank only.
    `cuda_graphs`: see `TorchRunner.load`; None for those that TGI records. With `ranks`, this
    rank's part is loaded; rank 0 alone chooses tokens. `fresh_files`: as `reading_ahead` yields
    them, where nobody else reads them. The rest as for `TorchRunner.load`. Raises
    ModelLoadError for files that cannot be used, ConfigurationError for settings that cannot.
    """
    _check(device, ranks, quantize, cpu_backend)
    config = read_config(folder)
    limit_memory(device, cuda_memory_fraction)
    sizes = graph_sizes(device, cuda_graphs)
    chooses = ranks is None or ranks.rank == 0
    grammars = _grammars(tokenizer, config) if chooses else None
    if device == CPU and ranks is None and cpu_backend != "torch":
        from tgi_trio.shard.cpu.fitting import UnfitError
        from tgi_trio.shard.cpu.load import load

        kind = compute_dtype(dtype, config, on_cpu=True)
        try:
            return load(
                config,
                decoder_spec(config),
                dtype=kind,
                int8=quantize == "eetq",
                grammars=grammars,
                threads=threads,
                fresh_files=fresh_files,
            )
        except UnfitError as error:
            if cpu_backend == "numba" or quantize is not None:
                raise _unserved(error, quantize) from error
            print(f"served with torch, not with the CPU kernels: {error}", file=sys.stderr)

    from tgi_trio.shard.model_runner import TorchRunner

    return TorchRunner.load(
        folder,
        dtype=dtype,
        device=device,
        ranks=ranks,
        threads=threads,
        sampler=None if chooses else NoSampler(),
        grammars=grammars,
        cuda_graphs=sizes,
    )


def _check(device: str, ranks: Ranks | None, quantize: str | None, cpu_backend: str) -> None:
    """Raise ConfigurationError for what the CPU kernels alone can do, where they cannot serve."""
    if quantize is not None and (device != CPU or ranks is not None or cpu_backend == "torch"):
        raise ConfigurationError(
            f"--quantize {quantize} is served by the CPU kernels alone, on one rank; leave it out "
            "to serve the weights as they are."
        )
    if ranks is not None and cpu_backend == "numba":
        raise ConfigurationError(
            "The CPU kernels compute a model on one rank; leave --cpu-backend out, or use "
            "--num-shard 1."
        )


def _unserved(reason: Exception, quantize: str | None) -> ConfigurationError:
    flag = "--cpu-backend" if quantize is None else "--quantize"
    return ConfigurationError(
        f"The CPU kernels cannot serve this model: {reason}. Leave {flag} out to serve it with "
        "torch."
    )


def _grammars(tokenizer: Path | None, config: ModelConfig) -> Grammars | None:
    """Return what serves grammars, if they are wanted."""
    if tokenizer is None:
        return None
    from tgi_trio.shard.grammars import load_grammars

    return load_grammars(tokenizer, config.eos_ids, config.vocab_size)
