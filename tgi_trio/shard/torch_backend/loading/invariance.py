"""Refuses what cannot be computed alike at any load, where `--batch-invariant` asks for that."""

from __future__ import annotations

import torch

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.fit.invariant_claims import find_variant, refuse_batch_invariance
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.t5 import T5Spec
from tgi_trio.shard.torch_backend.attention.kinds import make_capturable
from tgi_trio.shard.torch_backend.layers.activation import SparseActivation
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, Mlp
from tgi_trio.shard.torch_backend.layers.streams.alternating_updates import holds_streams
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import holds_state
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.states.mamba2_layer import Mamba2Layer
from tgi_trio.shard.torch_backend.torch_device import runs_kernels


def check_invariance(
    settings: ShardSettings, spec: DecoderSpec | T5Spec | None, device: torch.device
) -> None:
    """Raise ConfigurationError before loading a model that is to be computed alike, and is not."""
    if not settings.batch_invariant:
        return
    if spec is None:
        raise refuse_batch_invariance("the model runs through transformers")
    if isinstance(spec, T5Spec):
        raise refuse_batch_invariance("torch computes a model with an encoder")
    if not runs_kernels(device):
        raise refuse_batch_invariance(
            f"torch computes the model on {device}, and its sums follow the step's size"
        )
    if settings.activations == 8:
        raise refuse_batch_invariance("--activations 8 is multiplied by a library")
    if reason := find_variant(spec):
        raise refuse_batch_invariance(reason)


def check_loaded(settings: ShardSettings, model: Decoder, device: torch.device) -> None:
    """Raise ConfigurationError for what is known of a model only once it has been loaded."""
    if not settings.batch_invariant:
        return
    if not model.groups_experts:
        raise refuse_batch_invariance(
            "its experts are stored in ways that differ, so torch adds them up"
        )
    if not _holds_hidden_states(model.spec):
        raise refuse_batch_invariance(
            "its hidden states are too large for our kernels, so torch mixes them"
        )
    if not all(_cuts_alike(layer.mlp, model.spec) for layer in model.layers):
        raise refuse_batch_invariance(
            "torch cuts gates of its MLPs at a bound, as our kernels do not for such"
        )
    if model.scans_in_turns:
        raise refuse_batch_invariance(
            "its states are too large for our kernels, so torch moves them"
        )
    mixers = (layer.mixer for layer in model.layers)
    if any(isinstance(mixer, Mamba2Layer) and mixer.gathers_norms for mixer in mixers):
        raise refuse_batch_invariance(
            "torch normalises groups of heads that are on several ranks, or very large"
        )
    if make_capturable(model.attention_needs, device) is None:
        raise refuse_batch_invariance("its heads are too large for our kernels, so torch attends")


def _holds_hidden_states(spec: DecoderSpec) -> bool:
    """Return whether kernels mix a token's hidden states, if it has several."""
    if spec.streams is not None and not holds_streams(spec.streams.count, spec.hidden_size):
        return False
    several = spec.hyper is not None or spec.gated_streams is not None
    return not several or holds_state(spec.hidden_size)


def _cuts_alike(mlp: Mlp | None, spec: DecoderSpec) -> bool:
    """Return whether a kernel cuts an MLP's gates at a bound, if they are cut."""
    act = mlp.act if isinstance(mlp, DenseMlp) else None
    if isinstance(act, Gate) and isinstance(act.act, SparseActivation):
        return act.cuts(max(spec.mlp_width, *(layer.mlp_width for layer in spec.layers)))
    return not isinstance(act, SparseActivation)
