"""A backend computes what it claims; what nobody has claimed is refused by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.cpu_backend.kernel_support import FITTING, LLAMA
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.claims import ANY, Claims, find_unclaimed, multiples, only
from tgi_trio.model.fit import cpu_kernels as kernel_fit
from tgi_trio.model.fit import decoder as decoder_fit
from tgi_trio.model.fit import kernel_claims
from tgi_trio.model.specs.activations import PLAIN
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.decoder import (
    CompressionSpec,
    CrossAttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    HeadSizes,
    HyperSpec,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    Names,
    PerLayerInputsSpec,
    QueryScale,
    RotarySpec,
    SharedBlock,
    SharedKeySpec,
    StreamsSpec,
)
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.model.specs.mixers import (
    DeltaRule,
    Mamba1,
    Mamba2,
    Mixer,
    RecurrentGate,
    ShortConvolution,
)
from tgi_trio.model.specs.ngrams import NgramsSpec
from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS

RECORDS = (
    BlockIndexSpec,
    CompressionSpec,
    CrossAttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    HeadSizes,
    HyperSpec,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    Names,
    PerLayerInputsSpec,
    QueryScale,
    RotarySpec,
    SharedBlock,
    SharedKeySpec,
    StreamsSpec,
    ShortConvolution,
    DeltaRule,
    Mamba2,
    Mamba1,
    RecurrentGate,
    GatedStreamsSpec,
    NgramsSpec,
    PooledIndexSpec,
)
FIELDS = {f"{kind.__name__}.{field.name}" for kind in RECORDS for field in dataclasses.fields(kind)}
KINDS = [  # fields whose values are a list of words
    (f"{kind.__name__}.{name}", typing.get_args(hint))
    for kind in RECORDS
    for name, hint in typing.get_type_hints(kind).items()
    if typing.get_origin(hint) is typing.Literal
]


def test_the_activations_that_a_start_lets_in_are_those_there_are() -> None:
    assert sorted(ACTIVATIONS) == sorted(PLAIN)


def test_torch_claims_every_field_of_a_model() -> None:
    assert decoder_fit.CLAIMS.keys() == FIELDS


def test_the_kernels_claim_every_field_of_a_model() -> None:
    assert kernel_claims.CLAIMS.keys() == FIELDS


def test_the_kernels_compute_several_hidden_states_as_one_family_has_them() -> None:
    def refusal(streams: StreamsSpec, **changes: Any) -> str | None:
        own = PerLayerInputsSpec(width=32, rows=64, image_token=0)
        spec = dataclasses.replace(LLAMA, streams=streams, per_layer_inputs=own)
        return kernel_fit.find_unsupported(dataclasses.replace(spec, **changes), "float32")

    streams = StreamsSpec(4, 0, scaled=True, detour_rank=32)
    assert refusal(streams) is None
    alone = "layers with several hidden states have no embeddings of their own"
    assert refusal(streams, per_layer_inputs=None) == alone
    other = "layers with several hidden states are not those of Gemma 3n"
    assert refusal(streams, parallel=True) == other
    wide = "detours of 8 numbers, which is no multiple of 32"
    assert refusal(dataclasses.replace(streams, detour_rank=8)) == wide
    many = "a token has 17 hidden states, which are more than 16"
    assert refusal(dataclasses.replace(streams, count=17)) == many


def test_the_kernels_compute_compressed_keys_and_values_that_fill_panels() -> None:
    def refusal(latent: LatentSpec, **changes: Any) -> str | None:
        dim = latent.rank + latent.rotary_dim
        spec = dataclasses.replace(LLAMA, latent=latent, kv_heads=1, head_dim=dim, **changes)
        return kernel_fit.find_unsupported(spec, "float32")

    latent = LatentSpec(rank=64, query_rank=0, plain_dim=32, rotary_dim=32, value_dim=96)
    assert refusal(latent) is None
    odd = dataclasses.replace(latent, value_dim=48)
    assert refusal(odd) == "latents with 48 numbers, which is no multiple of 32"
    assert refusal(latent, parallel=True) == (
        "compressed keys and values have what only whole ones have here"
    )
    assert refusal(latent, gated_heads=True) is None
    assert refusal(latent, gated_attention=True) == (
        "what is read of compressed keys and values has a gate for each number"
    )
    grids = RotarySpec(dim=32, sections=(8, 4, 4))
    layers = (LayerSpec(scale=0.2, rotary=grids),)
    assert refusal(latent, layers=layers) == "compressed keys turn by places in images"


def test_the_kernels_compute_states_beside_layers_of_attention() -> None:
    def refusal(mixer: Mixer, *, attends: bool = False) -> str | None:
        layer = dataclasses.replace(LLAMA.layers[0], mixer=mixer, attends=attends)
        hybrid = dataclasses.replace(LLAMA, layers=(layer, LLAMA.layers[0]))
        return kernel_fit.find_unsupported(hybrid, "float32")

    mixer = ShortConvolution(64, 3)
    assert refusal(mixer) is None
    assert refusal(ShortConvolution(48, 3)) == "48 channels are no multiple of 32"
    beside = "a layer has attention and keeps a state beside it that is not Mamba-2's"
    assert refusal(mixer, attends=True) == beside
    scanned = Mamba2(2, 32, 1, 32, 4, 1e-6, output_multiplier=0.5)
    assert refusal(scanned, attends=True) is None
    layer = dataclasses.replace(LLAMA.layers[0], mixer=mixer, attends=False)
    lone = dataclasses.replace(LLAMA, layers=(layer,))
    assert kernel_fit.find_unsupported(lone, "float32") is None
    assert refusal(Mamba1(64, 16, step_rank=4, taps=4)) is None
    assert refusal(Mamba1(64, 8, step_rank=4, taps=4)) == (
        "a state of 8 numbers per channel, which is no multiple of 16"
    )
    assert refusal(RecurrentGate(2, 16, 4, "gelu")) == "16 channels are no multiple of 32"
    parallel = dataclasses.replace(LLAMA, layers=(layer, LLAMA.layers[0]), parallel=True)
    assert kernel_fit.find_unsupported(parallel, "float32") == (
        "what keeps a state is parallel to the MLP"
    )
    channels = DeltaRule(2, 2, 32, 64, 4, "compressed", 1e-6, by_channel=True, channel_rank=32)
    assert refusal(channels) is None
    assert refusal(dataclasses.replace(channels, channel_rank=16)) == (
        "decays per channel of 16 numbers, which is no multiple of 32"
    )
    assert refusal(dataclasses.replace(channels, value_dim=48)) == (
        "values of 48 numbers, which is no multiple of 32"
    )
    bounded = dataclasses.replace(channels, least_decay=-5.0)
    assert refusal(bounded) is None
    assert refusal(dataclasses.replace(bounded, by_channel=False, layout="separate")) == (
        "decays of a delta rule that are not by channel have a bound"
    )


def test_the_kernels_compute_experts_beside_an_mlp_that_norms_join() -> None:
    experts = ExpertsSpec(count=4, per_token=2, width=64, normalise=True)
    layers = (dataclasses.replace(LLAMA.layers[0], experts=experts),)
    beside = dataclasses.replace(LLAMA, layers=(dataclasses.replace(layers[0], beside=True),))
    assert kernel_fit.find_unsupported(beside, "float32") == (
        "experts beside an MLP join it without a norm"
    )


def test_the_kernels_refuse_norms_of_what_is_scaled() -> None:
    def refusal(spec: DecoderSpec) -> str | None:
        return kernel_fit.find_unsupported(spec, "float32")

    normed = dataclasses.replace(
        LLAMA, names=dataclasses.replace(LLAMA.names, attention_post_norm="norm")
    )
    assert refusal(normed) is None
    said = "what attention or a state space says is scaled, then normed"
    assert refusal(dataclasses.replace(LLAMA, attention_scale=0.5)) is None
    assert refusal(dataclasses.replace(normed, attention_scale=0.5)) == said
    mixer = Mamba2(2, 32, 1, 32, 4, 1e-6)
    layer = dataclasses.replace(LLAMA.layers[0], mixer=mixer)
    summed = "a layer has attention and keeps a state beside it, and their sum is normed"
    assert refusal(dataclasses.replace(normed, layers=(layer,))) == summed
    cut = dataclasses.replace(LLAMA.layers[0], sparsity=0.5)
    scaled = dataclasses.replace(LLAMA, layers=(cut,), gate_scale=0.5)
    assert refusal(scaled) == "gates are scaled and cut at a bound"


def test_the_kernels_compute_experts_of_compressed_tokens() -> None:
    def refusal(width: int, **changes: str) -> str | None:
        experts = ExpertsSpec(
            count=4, per_token=2, width=64, normalise=True, latent_width=width, shared_width=64
        )
        layers = (dataclasses.replace(LLAMA.layers[0], experts=experts),)
        own = dataclasses.replace(LLAMA.names, **changes)
        spec = dataclasses.replace(LLAMA, layers=layers, names=own)
        return kernel_fit.find_unsupported(spec, "float32")

    assert refusal(32) is None
    odd = "experts read compressed tokens of 40 numbers, which is no multiple of 32"
    assert refusal(40) == odd
    assert refusal(96) == "experts read compressed tokens that are wider than others"
    normed = "experts read compressed tokens, and there is a norm behind them"
    assert refusal(32, mlp_post_norm="norm") == normed


def test_the_kernels_refuse_experts_of_odd_sizes() -> None:
    def refusal(**numbers: int) -> str | None:
        known = {"count": 4, "per_token": 2, "width": 64, "normalise": True}
        experts = ExpertsSpec(**(known | numbers))  # type: ignore[arg-type]
        layers = (dataclasses.replace(LLAMA.layers[0], experts=experts),)
        return kernel_fit.find_unsupported(dataclasses.replace(LLAMA, layers=layers), "float32")

    assert refusal() is None
    assert refusal(width=48) == "expert width 48 is no multiple of 32"
    assert refusal(shared_width=40) == "width 40 of the shared expert is no multiple of 32"
    assert refusal(count=5000) == "there are more than 4096 experts"


@pytest.mark.parametrize(("key", "values"), KINDS)
def test_values_that_are_words_are_claimed_one_by_one(key: str, values: tuple[str, ...]) -> None:
    assert all(decoder_fit.CLAIMS[key].serves(value) for value in values)
    for claims in (decoder_fit.CLAIMS, kernel_claims.CLAIMS):
        assert key not in claims or not claims[key].serves("of tomorrow")


def without(claims: Claims, key: str) -> Claims:
    return {name: claim for name, claim in claims.items() if name != key}


def test_a_field_that_is_not_claimed_may_be_what_it_is_by_default() -> None:
    claims = without(decoder_fit.CLAIMS, "DecoderSpec.qkv_clip")
    assert find_unclaimed(LLAMA, claims) is None
    clipped = dataclasses.replace(LLAMA, qkv_clip=8.0)
    assert find_unclaimed(clipped, decoder_fit.CLAIMS) is None
    assert (
        find_unclaimed(clipped, claims) == "DecoderSpec.qkv_clip is 8.0, which is not computed here"
    )
    assert find_unclaimed(LLAMA, without(claims, "LayerSpec.scale")) is not None  # has no default


def test_records_in_every_layer_are_looked_at() -> None:
    odd = dataclasses.replace(LLAMA.layers[0], rotary=RotarySpec(dim=32, theta=5.0))
    claims = {**decoder_fit.CLAIMS, "RotarySpec.theta": only(10000.0, refusal="base {}")}
    assert find_unclaimed(LLAMA, claims) is None
    assert (
        find_unclaimed(dataclasses.replace(LLAMA, layers=(*LLAMA.layers, odd)), claims)
        == "base 5.0"
    )


def test_a_claim_says_what_it_refuses() -> None:
    claims = {**decoder_fit.CLAIMS, "DecoderSpec.heads": multiples(4, "{} heads")}
    assert find_unclaimed(LLAMA, claims) == "2 heads"
    assert find_unclaimed(dataclasses.replace(LLAMA, heads=8), claims) is None
    assert ANY.serves(object())


def test_what_is_not_claimed_is_refused_at_load(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    folder = checkpoint("granite", **FITTING["granite"])  # which scales its residual stream
    for support in (kernel_fit, decoder_fit):
        claims = without(support.CLAIMS, "DecoderSpec.residual_scale")
        monkeypatch.setattr(support, "CLAIMS", claims)
    with pytest.raises(
        ModelLoadError, match=r"DecoderSpec\.residual_scale is .* not computed here"
    ):
        load_runner(ShardSettings(model_path=folder, dtype="float32"))
    assert "not with the CPU kernels: DecoderSpec.residual_scale is" in capfd.readouterr().err
