"""Checks whether a model folder can be served as requested, before anything is spawned or loaded.

The launcher checks before it starts a shard, so a start that cannot work ends in a tenth of a
second with one sentence. Every rank checks again when it loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.checkpoint_tensors import gguf_files, read_tensors
from tgi_trio.model.config import ModelConfig, RopeScaling
from tgi_trio.model.exact_lengths import find_shortened
from tgi_trio.model.families.registry import FAMILIES, decoder_spec, find_contradictions
from tgi_trio.model.fit.cpu_kernels import find_undivided, find_unsupported, kernels_error
from tgi_trio.model.fit.decoder import check_supported
from tgi_trio.model.formats import (
    INDEX_DTYPES,
    SERVED_DTYPES,
    check_dtypes,
    check_format,
    check_tables,
    refuse_pieces,
)
from tgi_trio.model.gguf.block_types import has_scales
from tgi_trio.model.leftovers import find_mute_parts, is_harmless, refuse_leftovers
from tgi_trio.model.own_code import check_own_code, own_code, runnable_code
from tgi_trio.model.parts import PARTS
from tgi_trio.model.published import is_published
from tgi_trio.model.quantised.gguf_layout import GgufLayout
from tgi_trio.model.quantised.layout import MatrixLayout
from tgi_trio.model.quantised.recognise import check_stated, find_layout, find_made
from tgi_trio.model.quantised.stored import StoredMatrices, check_stored
from tgi_trio.model.specs.activations import check_activation
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.t5 import T5_FAMILIES, T5Spec, t5_spec
from tgi_trio.model.split import check_split
from tgi_trio.model.stages import check_stages
from tgi_trio.model.tensors import (
    Shape,
    TensorClaims,
    decoder_claims,
    decoder_copies,
    decoder_matrices,
    t5_claims,
)
from tgi_trio.model.transformers_types import list_configured_types, list_text_types
from tgi_trio.model.unserved_types import find_classes, find_unserved_type, writing_refusal


class ServingSettings(Protocol):
    """How a model is to be served, as far as it may rule that out; the settings implement it."""

    @property
    def dtype(self) -> str: ...
    @property
    def num_shard(self) -> int: ...
    @property
    def pipeline_stages(self) -> int: ...  # each has num_shard / pipeline_stages ranks
    @property
    def quantize(self) -> str | None: ...  # how weights are stored, or to what they are rounded
    @property
    def kv_cache_dtype(self) -> str | None: ...  # of K and V, if not the model's
    @property
    # bits of activations that quantised weights are multiplied with
    def activations(self) -> int | None: ...
    @property
    def cpu_backend(self) -> str: ...  # "kernels": only the CPU kernels will do
    @property
    def trust_remote_code(self) -> bool: ...  # the folder's own code may be run
    @property
    def rope(self) -> RopeScaling | None: ...  # replaces the checkpoint's


def check_model(config: ModelConfig, serving: ServingSettings) -> list[str]:
    """Raise ModelLoadError or ConfigurationError if a model cannot be served as requested.

    Return warnings, a sentence each.
    """
    warnings = check_drafter(config)
    if (why := find_classes(config)) is not None:
        raise ModelLoadError(writing_refusal(config.model_type, why))
    spec = supported_spec(config)
    warnings += find_contradictions(config) + find_mute_parts(config)
    warnings += find_shortened(config.values)
    parts = serving.num_shard // serving.pipeline_stages  # of every layer
    if scales := check_checkpoint(config, spec):
        from tgi_trio.model.scales import check_scales  # numpy: 60 ms

        check_scales(scales)
    if serving.quantize is not None:
        _check_quantize(config, serving.quantize)
    warnings += check_own_code(
        config,
        serving.trust_remote_code,
        needed=not is_known(config.model_type),
        ours=spec is not None,
    )
    if spec is None:
        _check_transformers(config, serving)
    else:
        if serving.pipeline_stages > 1:
            check_stages(spec, serving.pipeline_stages)
        if parts > 1:
            check_split(spec, parts)
    if serving.rope is not None:
        check_rotary(config, spec)
    if serving.kv_cache_dtype is not None:
        check_kv_cache(config, spec, serving.kv_cache_dtype)
    if serving.activations == 8 and not isinstance(spec, DecoderSpec):
        raise ConfigurationError(activations_refusal(config))
    if serving.cpu_backend == "kernels":
        decoder = spec if isinstance(spec, DecoderSpec) else None
        reason = find_unsupported(decoder, serving.dtype)
        if isinstance(spec, T5Spec):
            reason = "it has an encoder"
        if reason is not None:
            raise kernels_error(reason)
        if decoder is not None and (reason := find_undivided(decoder, parts)) is not None:
            raise kernels_error(reason, serving.num_shard)
    return warnings


def model_spec(config: ModelConfig) -> DecoderSpec | T5Spec | None:
    """Return the spec by which we run a model, or None: it runs through transformers.

    Raises ModelLoadError for a config.json whose values make no sense.
    """
    return t5_spec(config) if config.model_type in T5_FAMILIES else decoder_spec(config)


def supported_spec(config: ModelConfig) -> DecoderSpec | T5Spec | None:
    """Return `model_spec`; also raises ModelLoadError for parts that are not implemented."""
    spec = model_spec(config)
    if isinstance(spec, DecoderSpec):
        check_activation(spec.activation, learned=bool(spec.names.activation))
        check_supported(spec)
    return spec


def is_known(model_type: str) -> bool:
    """Return whether a model type is known to this package or to transformers."""
    return (
        model_type in FAMILIES
        or model_type in T5_FAMILIES
        or model_type in PARTS
        or model_type in list_configured_types()
    )


def check_checkpoint(
    config: ModelConfig, spec: DecoderSpec | T5Spec | None
) -> dict[str, StoredTensor]:
    """Raise ModelLoadError unless every tensor is there, readable, and either used or known.

    Return the tensors with scales of quantised matrices. `spec` None: transformers loads the model,
    and `check_unread` does the rest when it has.
    """
    tensors = read_tensors(config)
    layout: MatrixLayout | None = None
    if isinstance(spec, DecoderSpec):
        layout = GgufLayout() if gguf_files(config.folder) else find_layout(config)
    if layout is None:
        check_format(config, tensors)
    if spec is None:
        read = {name: t for name, t in tensors.items() if not is_harmless(name, config)}
        refuse_pieces(tensors, read)
        check_dtypes(read, INDEX_DTYPES)
        return {}
    if isinstance(spec, T5Spec):
        _check_claims(config, tensors, t5_claims(spec))
        return {}
    matrices, copies = decoder_matrices(spec), decoder_copies(spec)
    stored = check_stored(config, layout, matrices, spec.names.base, tensors, copies)
    _check_claims(config, tensors, decoder_claims(spec), stored)
    return dict(_scales(tensors, stored))


def _scales(
    tensors: Mapping[str, StoredTensor], stored: StoredMatrices
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors that contain scales, with the scales' dtype."""
    numbers = stored.parts - stored.codes
    for name, tensor in tensors.items():
        if name in stored.small_scales:
            yield name, replace(tensor, dtype=stored.small_scales[name])
        elif has_scales(tensor.dtype) or (name in numbers and tensor.dtype in SERVED_DTYPES):
            yield name, tensor


def check_unread(config: ModelConfig, unread: list[str]) -> None:
    """Raise ModelLoadError for tensors that transformers has not read, unless they are harmless."""
    refuse_leftovers(read_tensors(config), unread, config, text_only=True)


def check_drafter(config: ModelConfig) -> list[str]:
    """Return warnings about a trained drafter in a model's folder, which is not used.

    Raises ModelLoadError for a folder that contains only a drafter.
    """
    base = config.get("base_model_name_or_path")
    advice = f" Serve the model it was made for{f', {base}' if base else ''}, and name this folder "
    advice += "with --draft-model; --speculate N alone drafts from the text."
    if config.model_type == "mlp_speculator":
        raise ModelLoadError(
            f"{config.folder} holds an MLP speculator, which drafts for another model and "
            f"generates no text itself.{advice}"
        )
    if not config.get("medusa_num_heads"):
        return []
    tensors = read_tensors(config)
    if all(
        "medusa" in tensor.file.name or name.split(".")[0].isdigit() or "medusa" in name
        for name, tensor in tensors.items()
    ):
        raise ModelLoadError(
            f"{config.folder} holds Medusa heads alone, which draft for another model.{advice}"
        )
    return [
        f"config.json states {config.get('medusa_num_heads')} Medusa heads, which are not read "
        "from a model's own folder: it answers the same without them, one token a step. Heads in a "
        "folder of their own are named with --draft-model; --speculate N drafts from the text"
    ]


def check_rotary(config: ModelConfig, spec: DecoderSpec | T5Spec | None) -> None:
    """Raise ConfigurationError if the model has no rotary positions of ours to scale."""
    if isinstance(spec, DecoderSpec) and any(layer.rotary for layer in spec.layers):
        return
    why = "has no rotary positions" if spec is not None else "runs through transformers"
    cure = "leave both out"
    if spec is None:
        cure += ", or write rope_scaling into its config.json"
    raise ConfigurationError(
        f"--rope-scaling and --rope-factor scale the rotary positions of the models that are "
        f"computed here, and model type {config.model_type!r} {why}: {cure}"
    )


def _check_claims(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    claims: TensorClaims,
    stored: StoredMatrices = StoredMatrices(),  # noqa: B008 (frozen)
) -> None:
    base = claims.base
    if any(name.startswith(base) for name in tensors):
        base = ""
    shapes = {name.removeprefix(base): shape for name, shape in claims.known.items()}
    needed = {name.removeprefix(base): shape for name, shape in claims.needed.items()}
    for name in stored.matrices:
        needed.pop(name, None)
        shapes.pop(name, None)
    known = shapes.keys() | needed.keys()
    unread = tensors.keys() - known - stored.parts
    tables = {name.removeprefix(base) for name in claims.integers}
    check_dtypes({name: tensors[name] for name in (known & tensors.keys()) - tables})
    check_tables({name: tensors[name] for name in tables & tensors.keys()})
    # Before missing tensors, since the weight of a quantised matrix is missing as well.
    refuse_pieces(tensors, (name for name in unread if not is_harmless(name, config)))
    if missing := sorted(needed.keys() - tensors.keys()):
        raise ModelLoadError(
            f"Tensor {missing[0]!r} is missing from the checkpoint {config.folder}."
        )
    refuse_leftovers(tensors, unread, config, text_only=config.wraps_text)
    _check_shapes(tensors, shapes | needed)


def _check_shapes(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, Shape | None]) -> None:
    """Raise ModelLoadError for a tensor of the wrong shape; None means any shape."""
    for name in sorted(shapes.keys() & tensors.keys()):
        wanted, found = shapes[name], tensors[name]
        if wanted not in (None, found.shape):
            raise ModelLoadError(
                f"Tensor {name!r} in {found.file} has shape {list(found.shape)}, but config.json "
                f"asks for {list(wanted)}."
            )


def _check_transformers(config: ModelConfig, serving: ServingSettings) -> None:
    """Raise for a model that transformers cannot run, or not as requested."""
    name, known = config.model_type, list_text_types()
    code = runnable_code(config) if serving.trust_remote_code else None
    published = is_published(config.values)
    if published or (known and name not in known and code is None):
        advice = "transformers does not know it"
        if name in PARTS or published:
            advice = f"its text is of the type {config.text_type!r}, which is not computed here"
        elif own_code(config) is not None:
            advice = "it brings its own code, which is run with --trust-remote-code alone"
            if serving.trust_remote_code:
                advice = "its own code is not all in the folder"
        ours = "is not one of ours"
        if name in FAMILIES:  # whose function has said None
            ours = "is computed here, but not with all that config.json says"
        raise ModelLoadError(
            f"Model type {name!r} {ours}, and transformers cannot load {config.folder} as a model "
            f"that generates text: {advice}."
        )
    if code is None and (why := find_unserved_type(config)) is not None:
        raise ModelLoadError(writing_refusal(name, why))
    if serving.pipeline_stages > 1:
        raise ModelLoadError(stages_refusal(config))
    if serving.num_shard > 1 and config.get("is_encoder_decoder"):
        raise ModelLoadError(encoder_split_refusal(name))
    if (made := find_made(config, serving.quantize)) is not None:
        raise ConfigurationError(rounding_refusal(config, made))


def _check_quantize(config: ModelConfig, stated: str) -> None:
    """Raise ConfigurationError if `--quantize` contradicts the checkpoint."""
    if files := gguf_files(config.folder):
        kinds = {tensor.dtype for tensor in read_tensors(config).values()} - SERVED_DTYPES.keys()
        if kinds and stated != "gguf":
            raise ConfigurationError(
                f"--quantize {stated} contradicts {files[0].name}, whose weights are GGUF's "
                f"{', '.join(sorted(kinds))}: leave --quantize out"
            )
    check_stated(config, stated)


def stages_refusal(config: ModelConfig) -> str:
    """Return the refusal to cut a model that runs through transformers into pipeline stages."""
    return (
        f"Model type {config.model_type!r} runs through transformers, whose models are not cut "
        "into stages here: leave --pipeline-stages out, and --num-shard divides each layer where "
        "transformers has a plan for that."
    )


def encoder_split_refusal(model_type: str) -> str:
    """Return the refusal to split an encoder-decoder that runs through transformers."""
    return (
        f"Model type {model_type!r} is an encoder-decoder that runs through transformers, which is "
        "not split over shards here; use --num-shard 1."
    )


def rounding_refusal(config: ModelConfig, made: str) -> str:
    """Return the refusal to round the weights of a model that runs through transformers."""
    return (
        f"--quantize {made} rounds the weights of models that are computed here, and model type "
        f"{config.model_type!r} runs through transformers: leave it out."
    )


def heads_refusal(config: ModelConfig) -> str:
    """Return the refusal of speculation heads for a model that is not a generic decoder."""
    return (
        f"--draft-model holds heads, which draft for models of the generic decoder, and model type "
        f"{config.model_type!r} is none of them: leave it out; --speculate N drafts from the text."
    )


def check_draft_model(folder: Path, spec: DecoderSpec | T5Spec | None) -> None:
    """Raise ConfigurationError if the model in `folder` cannot be a draft model."""
    if isinstance(spec, DecoderSpec) and any(layer.mixer for layer in spec.layers):
        raise ConfigurationError(
            f"{folder} cannot draft for another model: its layers keep a state per sequence, which "
            "wrong drafts cannot be taken out of; use a draft model of attention alone"
        )


def activations_refusal(config: ModelConfig) -> str:
    """Return the refusal of 8-bit activations for a model that cannot have them."""
    return (
        f"--activations 8 is for the models of the generic decoder, and model type "
        f"{config.model_type!r} is none of them: leave it out."
    )


def check_kv_cache(config: ModelConfig, spec: DecoderSpec | T5Spec | None, dtype: str) -> None:
    """Raise ConfigurationError if a model cannot have an 8-bit KV cache."""
    if not isinstance(spec, DecoderSpec):
        raise ConfigurationError(
            f"--kv-cache-dtype {dtype} is for the models of the generic decoder, and model type "
            f"{config.model_type!r} is none of them: leave it out."
        )
    if any(layer.compression for layer in spec.layers):
        raise ConfigurationError(
            f"--kv-cache-dtype {dtype} rounds keys and values, and model type "
            f"{config.model_type!r} keeps beside them what its compressed keys are made of: leave "
            "it out."
        )
