"""A T5 checkpoint -> the model: its spec from config.json, its weights by name."""

from __future__ import annotations

import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.layers.activation import activation
from tgi_trio.shard.layers.linear import Linear
from tgi_trio.shard.layers.mlp import DenseMlp
from tgi_trio.shard.layers.norm import Norm
from tgi_trio.shard.layers.vocabulary import Gathering
from tgi_trio.shard.model_config import ModelConfig
from tgi_trio.shard.models.t5 import T5, Block, CrossAttention, T5Spec
from tgi_trio.shard.weights import WeightSource

T5_FAMILIES = ("t5", "mt5", "umt5")


def t5_spec(config: ModelConfig) -> T5Spec:
    """Return the numbers of a model whose type is one of T5_FAMILIES.

    Raises ModelLoadError for a config.json whose values make no sense.
    """
    try:
        return _spec(config)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{config.folder / 'config.json'} cannot be right for model type "
            f"{config.model_type!r}: {error}."
        ) from error


def _spec(config: ModelConfig) -> T5Spec:
    kind = str(
        config.get("feed_forward_proj", "relu" if config.model_type == "t5" else "gated-gelu")
    )
    gate, _, act = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise ValueError(f"feed_forward_proj {kind!r} is neither 'ACT' nor 'gated-ACT'")
    layers, hidden = int(config.need("num_layers")), int(config.need("d_model"))
    # Whether the decoder's output is scaled before the head: T5 1.1 and mT5 do not. Files written
    # by transformers 5 say so by name, since there all of them say that the head is tied.
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


def load_t5(spec: T5Spec, source: WeightSource, ranks: Gathering | None = None) -> T5:
    """Read every weight; raises ModelLoadError naming one that is missing or misshapen.

    Heads with their biases by distance, MLP columns and the vocabulary are split over the ranks;
    norms are whole on each. Raises ModelLoadError too for what cannot be split evenly.
    """
    return _Loader(spec, source).model(ranks)


class _Loader:
    def __init__(self, spec: T5Spec, source: WeightSource) -> None:
        self.spec = spec
        self.source = source
        self.inner = spec.heads * spec.head_dim
        self.heads = source.share(spec.heads, "attention heads")
        self.dims = slice(self.heads.start * spec.head_dim, self.heads.stop * spec.head_dim)
        self.columns = source.share(spec.mlp_width, "MLP columns")
        self.vocabulary = source.block(spec.vocab_size)

    def model(self, ranks: Gathering | None) -> T5:
        spec = self.spec
        embedding = self.vocabulary_rows("shared.weight")
        # A head of its own counts if the file has one, whatever tie_word_embeddings says: the
        # published files of T5 1.1 and mT5 contradict themselves.
        tied = "lm_head.weight" not in self.source
        head = embedding if tied else self.vocabulary_rows("lm_head.weight")
        return T5(
            spec,
            embedding=embedding,
            encoder=self.stack("encoder", spec.encoder_layers, mlp=1),
            encoder_norm=self.norm("encoder.final_layer_norm"),
            decoder=self.stack("decoder", spec.decoder_layers, mlp=2),
            cross=[self.cross(i) for i in range(spec.decoder_layers)],
            decoder_norm=self.norm("decoder.final_layer_norm"),
            head=Linear(head),
            tied=tied,
            heads=self.heads.stop - self.heads.start,
            vocabulary=self.vocabulary,
            ranks=ranks,
        )

    def vocabulary_rows(self, name: str) -> torch.Tensor:
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        return self.source.matrix(name, shape, rows=self.vocabulary)

    def stack(self, name: str, layers: int, mlp: int) -> list[Block]:
        """Return the blocks of one stack; their MLP is sub-layer number `mlp`."""
        spec, blocks = self.spec, list[Block]()
        for index in range(layers):
            place = f"{name}.block.{index}.layer."
            own = f"{place}0.SelfAttention."
            bias = f"{own}relative_attention_bias.weight"
            # T5 and mT5 keep one table, in the first layer; UMT5 one per layer.
            if index == 0 or bias in self.source:
                shape = (spec.buckets, spec.heads)
                table = self.source.matrix(bias, shape, columns=self.heads)
            blocks.append(
                Block(
                    distance_bias=table,
                    norm=self.norm(f"{place}0.layer_norm"),
                    qkv=self.projections(own, "qkv"),
                    output=self.output(own),
                    mlp_norm=self.norm(f"{place}{mlp}.layer_norm"),
                    mlp=self.mlp(f"{place}{mlp}.DenseReluDense."),
                )
            )
        return blocks

    def cross(self, index: int) -> CrossAttention:
        place = f"decoder.block.{index}.layer.1."
        return CrossAttention(
            norm=self.norm(f"{place}layer_norm"),
            query=self.projections(f"{place}EncDecAttention.", "q"),
            key_value=self.projections(f"{place}EncDecAttention.", "kv"),
            output=self.output(f"{place}EncDecAttention."),
        )

    def projections(self, prefix: str, letters: str) -> Linear:
        """Return the projections `letters` of an attention as one linear."""
        shape, names = (self.inner, self.spec.hidden_size), [f"{prefix}{x}.weight" for x in letters]
        return Linear(
            torch.cat([self.source.matrix(name, shape, rows=self.dims) for name in names])
        )

    def output(self, prefix: str) -> Linear:
        shape = (self.spec.hidden_size, self.inner)
        return Linear(self.source.matrix(f"{prefix}o.weight", shape, columns=self.dims))

    def mlp(self, prefix: str) -> DenseMlp:
        spec, source, columns = self.spec, self.source, self.columns
        names = [f"{prefix}{x}.weight" for x in (("wi_0", "wi_1") if spec.gated else ("wi",))]
        shape = (spec.mlp_width, spec.hidden_size)
        up = torch.cat([source.matrix(name, shape, rows=columns) for name in names])
        down = source.matrix(f"{prefix}wo.weight", shape[::-1], columns=columns)
        return DenseMlp(Linear(up), Linear(down), activation(spec.activation), spec.gated)

    def norm(self, name: str) -> Norm:
        size = self.spec.hidden_size
        return Norm(
            "rms", self.source.vector(f"{name}.weight", size), None, self.spec.norm_eps, size
        )
