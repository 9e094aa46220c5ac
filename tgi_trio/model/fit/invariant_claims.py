"""The models that our kernels for devices compute alike whatever else is in a step.

No torch in this file. Of what the generic decoder computes, this leaves out layers whose sums
depend on how a prompt was cut, and those that torch's operations compute.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.claims import Claims, find_unclaimed, only
from tgi_trio.model.fit.decoder import CLAIMS as COMPUTED
from tgi_trio.model.specs.decoder import DecoderSpec

_STATES: Final = "scans of states go through a prompt in chunks that begin where a step does"
_CHOSEN: Final = "the kernels that choose what is attended to share their work by the step's size"
_STREAMS: Final = "torch adds up several hidden states of a token"
_NORMS: Final = "torch normalises queries and keys behind their rotation"
_LENGTHS: Final = "keys turn by the length of their sequence"

CLAIMS: Final[Claims] = {
    **COMPUTED,
    "LayerSpec.mixer": only(None, refusal=_STATES),
    "LayerSpec.ngrams": only(None, refusal=_STATES),
    "LayerSpec.shared": only(None, refusal=_STATES),
    "DecoderSpec.index": only(None, refusal=_CHOSEN),
    "LayerSpec.blocks": only(None, refusal=_CHOSEN),
    "LayerSpec.pooled": only(None, refusal=_CHOSEN),
    "DecoderSpec.shared_key": only(None, refusal=_CHOSEN),
    "DecoderSpec.hyper": only(None, refusal=_STREAMS),
    "DecoderSpec.streams": only(None, refusal=_STREAMS),
    "DecoderSpec.gated_streams": only(None, refusal=_STREAMS),
    "DecoderSpec.norm_after_rotary": only(False, refusal=_NORMS),
    "RotarySpec.kind": only(
        *("default", "linear", "llama3", "yarn", "proportional", "divided"), refusal=_LENGTHS
    ),
    "LatentSpec.doubled": only(False, refusal="latents have gates, which nobody has compared"),
    "DecoderSpec.gated_values": only(False, refusal="values have gates of latents"),
    "DecoderSpec.norm_gate_rank": only(0, refusal="torch opens gates behind norms"),
    "LayerSpec.crosses": only(None, refusal="torch attends to images"),
    "LayerSpec.sparsity": only(0.0, refusal="torch cuts gates at a bound"),
}


def find_variant(spec: DecoderSpec) -> str | None:
    """Return why a device cannot compute a model's tokens alike in every step, or None."""
    latents = [spec.latent, *(layer.latent for layer in spec.layers)]
    turns = (layer.rotary for layer in spec.layers if layer.rotary is not None)
    if any(latents) and any(turn.query_scale or turn.log_positions for turn in turns):
        return "queries over latents are scaled by their position, with torch"
    return find_unclaimed(spec, CLAIMS)


def unkept(reason: str) -> ConfigurationError:
    """Return the error for `--batch-invariant` where it cannot be kept for `reason`."""
    return ConfigurationError(
        f"--batch-invariant cannot be kept: {reason}. Leave it out, or serve with the CPU kernels "
        "where they fit the model: their answers are the same at any load."
    )
