"""What a model is loaded for by the CPU kernels, and which numbers its products are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.quantised.recognise import find_made
from tgi_trio.model.split import Portion
from tgi_trio.model.stages import Stage
from tgi_trio.shard.cpu_backend.instructions import dots, multiplies_codes
from tgi_trio.shard.cpu_backend.kinds.kind import Kind
from tgi_trio.shard.machine.cores import sensible_threads, share_cores, usable_cores
from tgi_trio.shard.machine.dtypes import compute_dtype

if TYPE_CHECKING:
    from tgi_trio.shard.ranks.neighbours import Neighbours
    from tgi_trio.shard.ranks.portions import Portions

# Formats with 8 bits and a scale for each output, to which packing can round weights itself.
INT8_WORDS: Final = ("eetq", "bitsandbytes")
ACTIVE_BITS: Final = 8  # of activations that are multiplied with codes, by default
# The same where all activations of a row share a scale, for which 8 bits are few.
FINE_BITS: Final = 16


@dataclass(frozen=True, slots=True)
class Target:
    """What a model is loaded for."""

    settings: ShardSettings
    config: ModelConfig
    dtype: str  # in which it is computed
    rounded: str | None  # the format to which linear layers are rounded; None: as stored
    stage: Stage | None  # this rank's, of a pipeline
    portion: Portion  # this rank's, of every layer
    cores: list[int]  # this rank's processors
    threads: int

    @property
    def int8(self) -> bool:
        """Whether packing itself rounds linear layers, to 8 bits."""
        if self.settings.activations is not None:
            return False
        # AVX2 makes float32 of codes as slowly as it multiplies it, and pairs of integers at once.
        faster = multiplies_codes() or dots() == "avx2"
        return self.becomes_int8 and not (self.dtype == "bfloat16" and faster)

    def find_bits(self, kind: Kind) -> int:
        """Return how many bits activations have that are multiplied with integers of a kind."""
        # Weights that become int8 are multiplied in float32 where nothing is faster.
        fine = kind.by_rows or (self.becomes_int8 and not kind.floating)
        return self.settings.activations or (FINE_BITS if fine else ACTIVE_BITS)

    @property
    def becomes_int8(self) -> bool:
        """Whether linear layers are rounded to 8 bits with a scale for each output."""
        return self.rounded in INT8_WORDS


def find_target(
    settings: ShardSettings,
    config: ModelConfig,
    neighbours: Neighbours | None,
    portions: Portions | None,
) -> Target:
    """Return the target of this rank, which shares its machine's processors with others."""
    place, ranks = settings.place_on_machine
    every = usable_cores()
    cores = share_cores(every, place, ranks, settings.cpu_threads or 0)
    worth = sensible_threads(settings.model_path, len(every)) // ranks
    return Target(
        settings,
        config,
        dtype=compute_dtype(settings.dtype, config, on_cpu=True),
        rounded=find_made(config, settings.quantize),
        stage=None if neighbours is None else neighbours.stage,
        portion=Portion() if portions is None else portions.portion,
        cores=cores,
        threads=settings.cpu_threads or max(1, min(len(cores), worth)),
    )
