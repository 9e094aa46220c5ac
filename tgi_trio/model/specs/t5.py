"""The spec of T5 and its relatives, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.model.config import NONSENSE, ModelConfig
from tgi_trio.model.nonsense import describe_nonsense
from tgi_trio.model.specs.plausible import check_numbers

T5_FAMILIES = ("t5", "mt5", "umt5")


@dataclass(frozen=True, slots=True)
class T5Spec:
    """The numbers of one model."""

    vocab_size: int
    hidden_size: int
    heads: int
    head_dim: int
    mlp_width: int
    encoder_layers: int
    decoder_layers: int
    buckets: int  # of relative distances
    max_distance: int  # all greater distances share a bucket
    activation: str
    gated: bool
    norm_eps: float
    logit_scale: float
    start_token: int  # the decoder's first token


def t5_spec(config: ModelConfig) -> T5Spec:
    """Return the spec of a model whose type is in T5_FAMILIES.

    Raises ModelLoadError for a config.json whose values make no sense.
    """
    try:
        return _checked_spec(config)
    except NONSENSE as error:
        raise describe_nonsense(config, error, _checked_spec) from error


def _checked_spec(config: ModelConfig) -> T5Spec:
    spec = _spec(config)
    check_numbers(spec)
    if spec.start_token >= spec.vocab_size:
        raise ValueError(
            f"decoder_start_token_id is {spec.start_token}, and there are {spec.vocab_size} tokens"
        )
    return spec


def _spec(config: ModelConfig) -> T5Spec:
    kind = str(
        config.get("feed_forward_proj", "relu" if config.model_type == "t5" else "gated-gelu")
    )
    gate, _, act = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise ValueError(f"feed_forward_proj {kind!r} is neither 'ACT' nor 'gated-ACT'")
    layers, hidden = int(config.need("num_layers")), int(config.need("d_model"))
    # Whether the decoder's output is scaled before the head: not in T5 1.1 and mT5. transformers 5
    # writes a key for it, since there all files state that the head is tied.
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    scaled = {"t5": tied, "mt5": False, "umt5": True}
    return T5Spec(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        heads=int(config.need("num_heads")),
        head_dim=int(config.need("d_kv")),
        mlp_width=int(config.need("d_ff")),
        encoder_layers=layers,
        decoder_layers=int(config.get("num_decoder_layers", layers)),
        buckets=int(config.get("relative_attention_num_buckets", 32)),
        max_distance=int(config.get("relative_attention_max_distance", 128)),
        activation="gelu_new" if kind == "gated-gelu" else act,
        gated=gate == "gated",
        norm_eps=float(config.get("layer_norm_epsilon", 1e-6)),
        logit_scale=hidden**-0.5 if scaled[config.model_type] else 1.0,
        start_token=int(config.get("decoder_start_token_id", config.get("pad_token_id", 0))),
    )
