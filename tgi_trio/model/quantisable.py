"""The models that `quantize` can write; checked before the work, so without torch."""

from __future__ import annotations

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import find_quantization_config
from tgi_trio.model.gguf.written import find_architecture
from tgi_trio.model.specs.decoder import DecoderSpec


def quantisable_spec(config: ModelConfig, target: str) -> DecoderSpec:
    """Return the spec of a model that can be quantised to `target`, "gptq" or "gguf:...".

    Raises ConfigurationError if it cannot be, ModelLoadError for a folder that cannot be used.
    """
    if find_quantization_config(config) is not None or list(config.folder.glob("*.gguf")):
        raise ConfigurationError(
            f"{config.folder} holds quantised weights: quantize starts from the original model."
        )
    spec = model_spec(config)
    if not isinstance(spec, DecoderSpec):
        raise ConfigurationError(
            f"quantize is for the models of the generic decoder, and model type "
            f"{config.model_type!r} is none of them."
        )
    if config.wraps_text:
        raise ConfigurationError(
            f"Model type {config.model_type!r} reads more than text, and quantize writes models "
            "of text alone; --quantize rounds its weights while they are loaded."
        )
    if target != "gptq":
        find_architecture(config, spec)
    elif (part := _unsolved_part(spec)) is not None:
        raise ConfigurationError(
            f"Model type {config.model_type!r} has {part}, which quantize cannot write as GPTQ; "
            "--quantize rounds its weights while they are loaded."
        )
    check_checkpoint(config, spec)
    return spec


def _unsolved_part(spec: DecoderSpec) -> str | None:
    """Return a part of the model that cannot be solved layer by layer or written, or None."""
    if any(layer.mixer for layer in spec.layers):
        return "layers that keep a state per sequence"
    if any(layer.cross_attention for layer in spec.layers):
        return "layers that attend to images"
    if spec.shared_key is not None:
        return "attention to one key per token"
    if spec.index is not None or any(layer.blocks or layer.pooled for layer in spec.layers):
        return "an index that chooses what tokens attend to"
    if spec.gated_streams is not None:
        return "several hidden states of a token"
    if any(layer.reads_layer is not None for layer in spec.layers):
        return "layers that read another layer's keys and values"
    if spec.per_layer_inputs is not None:
        return "layers with embeddings of their own"
    if any(layer.later for layer in spec.layers):
        return "experts whose result joins behind the next layer"
    experts = [layer.experts for layer in spec.layers if layer.experts]
    if experts and (spec.names.expert_gate_up or any(each.stacked for each in experts)):
        return "all experts of a layer in one tensor"
    return None
