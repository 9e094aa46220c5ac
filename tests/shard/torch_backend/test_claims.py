"""The tensors that a model is said to be made of are those that its loaders read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.torch_backend.family_variants import VARIANTS
from tests.shard.torch_backend.models_support import ALONE, GreedyRecorder
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.check import model_spec
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.kernel_claims import ACTIVATIONS
from tgi_trio.model.specs.t5 import T5_FAMILIES, T5Spec
from tgi_trio.model.tensors import TensorClaims, decoder_claims, t5_claims
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.cpu_backend.tables import ACTIVATIONS as KERNELS_ACTIVATIONS
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.weights import WeightSource

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [
    *((family, {}) for family in ALONE),
    *((family, {}) for family in T5_FAMILIES),
    *VARIANTS,
]


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> Iterator[set[str]]:
    """Yield the names that are asked for through a method whose first argument is a name."""
    names: set[str] = set()
    original = getattr(owner, method)

    def record(self: Any, name: str, *rest: Any, **options: Any) -> Any:
        names.add(name)
        return original(self, name, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, record)
        yield names


def claims_of(folder: Path) -> TensorClaims:
    spec = model_spec(read_config(folder))
    assert spec is not None
    return t5_claims(spec) if isinstance(spec, T5Spec) else decoder_claims(spec)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda v: str(v)[:20])
def test_torch_reads_what_is_claimed(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any]
) -> None:
    folder = checkpoint(family, **changes)
    claims = claims_of(folder)
    with recorded(monkeypatch, SafetensorsFiles, "tensor") as read:
        load_torch_runner(
            ShardSettings(model_path=folder), read_config(folder), sampler=GreedyRecorder()
        )
    needed = claims.needed.keys()
    assert needed <= read <= needed | claims.known.keys()
    stored = read_tensors(
        read_config(folder)
    ).keys()  # as save_pretrained writes it: nothing beside the model
    assert stored <= needed | claims.known.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FITTING)
def test_the_kernels_read_what_is_claimed(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = checkpoint(family, **FITTING[family])
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    with (
        recorded(monkeypatch, SafetensorsFiles, "tensor") as read,
        open_checkpoint(config, spec.names.base) as weights,
        pack_program(spec, weights, "float32"),
    ):
        pass
    assert read == decoder_claims(spec).needed.keys()


def test_the_kernels_have_the_activations_that_are_said_to_fit() -> None:
    assert KERNELS_ACTIVATIONS.keys() == set(ACTIVATIONS)


def test_every_rank_reads_what_is_claimed_but_biases_that_one_adds(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial sum's bias is added once, by rank 0."""
    from tgi_trio.shard.torch_backend.models.decoder_loading import load_decoder

    folder = checkpoint("gpt2")
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    claims = decoder_claims(spec)
    for rank in (0, 1):
        with (
            recorded(monkeypatch, SafetensorsFiles, "tensor") as read,
            open_checkpoint(config, spec.names.base, writable=True) as weights,
        ):
            source = WeightSource(weights, dtype=torch.float32, rank=rank, world_size=2)
            load_decoder(spec, source)
        missed = claims.needed.keys() - read
        assert read <= claims.needed.keys() | claims.known.keys()
        assert all(name.endswith("c_proj.bias") for name in missed)
        assert bool(missed) == (rank == 1)
