"""Which runner serves a model: the CPU kernels where they fit, torch everywhere else.

torch takes two seconds to import, numba with the kernels a third of one: either is imported only
where it is to serve.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.config import ModelConfig, RopeScaling, read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.kernel_fit import unserved
from tgi_trio.shard.contract import Runner
from tgi_trio.shard.machine.device import CPU, graph_sizes, limit_memory
from tgi_trio.shard.machine.dtypes import compute_dtype
from tgi_trio.shard.ranks.follower import NoSampler

if TYPE_CHECKING:
    from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark
    from tgi_trio.shard.torch_backend.models.decoder import Ranks


def load_runner(
    folder: Path,
    *,
    dtype: str | None = None,
    device: str = CPU,
    ranks: Ranks | None = None,
    threads: int | None = None,
    quantize: str | None = None,
    rope: RopeScaling | None = None,
    cpu_backend: str = "auto",
    cuda_graphs: tuple[int, ...] | None = None,
    cuda_memory_fraction: float = 1.0,
    tokenizer: Path | None = None,
    watermark: Watermark | None = None,
    fresh_files: frozenset[Path] = frozenset(),
    trust_remote_code: bool = False,
) -> Runner:
    """Load a folder as written by `save_pretrained`.

    `rope`: rotary scaling in place of the checkpoint's own.
    `quantize` "eetq": 8-bit weights, made by the CPU kernels. `cpu_backend`: "numba", "torch", or
    "auto" for numba where it fits, which is on one rank only. `cuda_graphs` None: those that TGI
    records. With `ranks`, this rank's part is loaded; rank 0 alone chooses tokens. `fresh_files`:
    as `reading_ahead` yields them. `trust_remote_code`: a model type that nobody else knows may run
    the code in its folder. The rest, and what is raised, as for `TorchRunner.load`.
    """
    _check(device, ranks, quantize, cpu_backend)
    config = read_config(folder, rope)
    limit_memory(device, cuda_memory_fraction)
    sizes = graph_sizes(device, cuda_graphs)
    chooses = ranks is None or ranks.rank == 0
    grammars = _grammars(tokenizer, config) if chooses else None
    if device == CPU and ranks is None and cpu_backend != "torch":
        runner = _load_kernels(
            config,
            dtype=dtype,
            quantize=quantize,
            needed=cpu_backend == "numba" or quantize is not None,
            grammars=grammars,
            watermark=watermark,
            threads=threads,
            fresh_files=fresh_files,
        )
        if runner is not None:
            return runner
    from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

    return TorchRunner.load(
        folder,
        dtype=dtype,
        device=device,
        ranks=ranks,
        rope=rope,
        threads=threads,
        sampler=None if chooses else NoSampler(),
        grammars=grammars,
        watermark=watermark,
        cuda_graphs=sizes,
        trust_remote_code=trust_remote_code,
        fresh_files=fresh_files if ranks is None else frozenset(),  # the others read them, too
    )


def _load_kernels(
    config: ModelConfig,
    *,
    dtype: str | None,
    quantize: str | None,
    needed: bool,
    grammars: GrammarMasks | None,
    watermark: Watermark | None,
    threads: int | None,
    fresh_files: frozenset[Path],
) -> Runner | None:
    """Load a model with the CPU kernels, or say why torch is to serve it.

    `needed`: torch will not do. Raises ConfigurationError where the kernels do not fit then.
    """
    from tgi_trio.shard.numba_backend.loading import load
    from tgi_trio.shard.numba_backend.unfit import UnsupportedError

    try:
        return load(
            config,
            decoder_spec(config),
            dtype=compute_dtype(dtype, config, on_cpu=True),
            int8=quantize == "eetq",
            grammars=grammars,
            watermark=watermark,
            threads=threads,
            fresh_files=fresh_files,
        )
    except UnsupportedError as error:
        if needed:
            raise unserved(error, quantize) from error
        print(f"served with torch, not with the CPU kernels: {error}", file=sys.stderr)
        return None


def _check(device: str, ranks: Ranks | None, quantize: str | None, cpu_backend: str) -> None:
    """Raise ConfigurationError for what the CPU kernels alone can do, where they cannot serve."""
    if quantize is not None and (device != CPU or ranks is not None or cpu_backend == "torch"):
        raise ConfigurationError(
            f"--quantize {quantize} is served by the CPU kernels alone, on one rank; leave it out "
            "to serve the weights as they are."
        )
    if device != CPU and cpu_backend == "numba":
        raise ConfigurationError(
            f"--cpu-backend numba computes on the CPU, and this shard computes on {device}; leave "
            "it out, or hide the device: CUDA_VISIBLE_DEVICES="
        )
    if ranks is not None and cpu_backend == "numba":
        raise ConfigurationError(
            "The CPU kernels compute a model on one rank; leave --cpu-backend out, or use "
            "--num-shard 1."
        )


def _grammars(tokenizer: Path | None, config: ModelConfig) -> GrammarMasks | None:
    """Return what serves grammars, if they are wanted."""
    if tokenizer is None:
        return None
    from tgi_trio.shard.sampling.guides import load_grammars

    return load_grammars(tokenizer, config.eos_ids, config.vocab_size)
