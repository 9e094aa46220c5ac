"""Models of real shapes whose random weights are made on the device: no checkpoint is read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.device.random_trellis import BYTES, EXL3, make_trellis
from bench.device.shapes import SHAPES
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.references import LinearRef, Share
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import round_matrix
from tgi_trio.shard.checkpoint.unpacked import unpack_matrix
from tgi_trio.shard.sampling.logits_processors import Watermark
from tgi_trio.shard.torch_backend.adapters.device_adapters import DeviceAdapters
from tgi_trio.shard.torch_backend.attention.kinds import make_attention
from tgi_trio.shard.torch_backend.compiling.ahead import begin_early
from tgi_trio.shard.torch_backend.device_parts import device_parts, rehearse_choices
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.stored_codes import Codes, encode
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import TrellisLinear
from tgi_trio.shard.torch_backend.models.decoder_loading import load_decoder
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner
from tgi_trio.shard.torch_backend.weights import WeightSource

ADAPTER_RANK = 16
PLAIN = "plain"  # weights are numbers of the dtype
_SLAB = 64  # outputs that are rounded; what is below them is the same again


class RandomWeights(WeightSource):
    """Whatever is asked for: matrices that keep the size of what passes, norms of ones."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        rounded: str = PLAIN,
        *,
        invariant: bool = False,
    ) -> None:
        """`rounded`: a word of `ENCODINGS` for linear layers that are to be codes, or EXL3."""
        self.invariant = invariant
        self.keeps_codes = False
        self.adapted = False  # those of `1B adapters` change no experts
        self.rounded = rounded
        self.dtype, self.device = dtype, device
        self.rank, self.world_size = 0, 1

    @property
    def rounds(self) -> bool:
        return False

    def __contains__(self, name: str) -> bool:
        return True

    def weight(self, linear: LinearRef, share: Share) -> torch.Tensor:
        cuts = list(linear.cuts(share))
        rows = sum(len(range(cut.matrix.rows)[cut.rows]) for cut in cuts)
        columns = cuts[0].width
        made = torch.empty((rows, columns), dtype=self.dtype, device=self.device)
        return made.normal_(std=columns**-0.5)

    def linear(self, linear: LinearRef, share: Share, bias: torch.Tensor | None) -> Linear:
        if self.rounded == PLAIN:
            return Linear(self.weight(linear, share), bias, invariant=self.invariant)
        outputs = sum(len(range(cut.matrix.rows)[cut.rows]) for cut in linear.cuts(share))
        if self.rounded == EXL3:
            made = make_trellis(next(linear.cuts(share)).width, outputs, self.device)
            return TrellisLinear([made], bias, self.dtype, self.device, invariant=self.invariant)
        codes = [self._codes(linear, share, outputs)]
        return CodedLinear(codes, bias, self.dtype, self.device, invariant=self.invariant)

    def _codes(self, linear: LinearRef, share: Share, outputs: int) -> Codes:
        cut = next(linear.cuts(share))
        slab = rounded_slab(cut.width, self.rounded)
        return replicate(slab.to(self.device), -(-outputs // _SLAB), outputs)

    def multiplies_codes(self, linear: LinearRef, share: Share) -> bool:
        return self.rounded != PLAIN

    @contextmanager
    def as_numbers(self) -> Iterator[None]:
        before, self.rounded = self.rounded, PLAIN
        yield
        self.rounded = before

    @contextmanager
    def giving_back(self) -> Iterator[None]:
        yield

    def bias(self, linear: LinearRef, share: Share) -> torch.Tensor | None:
        if not linear.biased:
            return None
        return torch.zeros(len(self.weight(linear, share)), dtype=self.dtype, device=self.device)

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        make = torch.zeros if name.endswith("bias") else torch.ones
        return make(size, dtype=dtype or self.dtype, device=self.device)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[slice, ...],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(std=0.1)[cut]

    def kv_scales(self, names: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[float, float]:
        return (1.0, 1.0)


@functools.cache  # a layer has few widths, and all layers have the same
def rounded_slab(inputs: int, word: str) -> Codes:
    """Return a few outputs of random weights, as codes on the host; see `ENCODINGS` for words."""
    draw = np.random.default_rng(inputs)
    values = draw.standard_normal((_SLAB, inputs), np.float32) * np.float32(inputs**-0.5)
    parts = unpack_matrix(round_matrix(PlainMatrix(values), ENCODINGS[word]))
    codes = None if parts is None else encode(parts)
    if codes is None:
        raise ValueError(f"no kernel multiplies {inputs} inputs as {word}")
    return codes


def replicate(codes: Codes, times: int, outputs: int) -> Codes:
    """Return a matrix several times below itself, cut to as many outputs."""
    every: dict[str, Any] = {
        name: tensor.repeat(times, 1)[:outputs]
        for name, tensor in codes.tensors().items()
        if name != "table"
    }
    return replace(codes, outputs=outputs, **every)


def bytes_of_weight(shape: str, dtype: torch.dtype, rounded: str) -> float:
    """Return the bytes that a weight of a linear layer takes as it is stored."""
    if rounded == PLAIN:
        return dtype.itemsize
    if rounded == EXL3:
        return BYTES
    inputs: int = config_of(shape).need("hidden_size")
    return rounded_slab(inputs, rounded).nbytes() / (_SLAB * inputs)


def values_of(shape: str) -> dict[str, Any]:
    """Return what the config.json of one of `SHAPES` would say."""
    return {"hidden_act": "silu", "tie_word_embeddings": True} | SHAPES[shape]


def config_of(shape: str) -> ModelConfig:
    """Return the configuration of a key of SHAPES; no token ends a sequence."""
    values = values_of(shape)
    return ModelConfig(
        folder=Path(shape),
        model_type=values["model_type"],
        dtype="bfloat16",
        vocab_size=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        eos_ids=(),
        values=values,
    )


def make_runner(
    shape: str,
    device: torch.device,
    dtype: torch.dtype,
    graphs: tuple[int, ...],
    rounded: str = PLAIN,
    adapters: int = 0,
    *,
    invariant: bool = False,
) -> TorchRunner:
    """Return a runner of a shape as a shard would load it, not warmed up.

    `adapters`: slots for those of ADAPTER_RANK.
    """
    begin_early(device)
    config = config_of(shape)
    spec = decoder_spec(config)
    if spec is None:
        raise ValueError(f"the generic decoder has no model type {config.model_type}")
    torch.manual_seed(0)
    sampler = Sampler(config.vocab_size, (), device, watermark=Watermark())
    rehearse_choices(sampler, config, device, dtype)
    with torch.inference_mode():
        weights = RandomWeights(dtype, device, rounded, invariant=invariant)
        model = load_decoder(spec, weights, None)
    held = None
    if adapters:
        held = DeviceAdapters(
            *(config, model, dtype, device),
            max_rank=ADAPTER_RANK,
            slots=adapters,
            invariant=invariant,
        )
    attention = make_attention(model.attention_needs, device, dtype, invariant=invariant)
    recorded, steps = device_parts(
        *(model, attention, sampler, config, device, graphs), adapters=held, invariant=invariant
    )
    return TorchRunner(
        model,
        config,
        dtype=dtype,
        device=device,
        sampler=sampler,
        attention=attention,
        graphs=recorded,
        steps=steps,
        adapters=held,
        invariant=invariant,
    )
