"""Loads this rank's part of a T5 model from a checkpoint."""

from __future__ import annotations

from tgi_trio.model.matrices.references import (
    LinearRef,
    MatrixRef,
    NormRef,
    run_of,
    split_inputs,
    split_outputs,
    stack_matrices,
)
from tgi_trio.model.matrices.roles import MlpRefs
from tgi_trio.model.specs.t5 import T5Spec
from tgi_trio.shard.torch_backend.layers.activation import activation
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.models.mlp_loading import load_dense_mlp
from tgi_trio.shard.torch_backend.models.t5 import T5, Block, CrossAttention
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader
from tgi_trio.shard.torch_backend.weights import WeightSource


def load_t5(spec: T5Spec, source: WeightSource, ranks: Gathering | None = None) -> T5:
    """Read every weight.

    Heads with their relative position biases, MLP columns and the vocabulary are split over the
    ranks; norms are whole on each. Raises ModelLoadError naming a weight that is missing or
    misshapen, and for what cannot be split evenly.
    """
    return _T5Loader(spec, source).model(ranks)


class _T5Loader(WeightLoader):
    def __init__(self, spec: T5Spec, source: WeightSource) -> None:
        super().__init__(source, "rms")
        self.spec = spec
        self.heads = run_of("heads", spec.heads, spec.head_dim)
        self.inner = spec.heads * spec.head_dim

    def model(self, ranks: Gathering | None) -> T5:
        spec, mine = self.spec, self.share(self.heads)
        table = self.vocabulary("shared.weight")
        embedding = self.weight(table)
        # A head in the file is used whatever tie_word_embeddings says: the published files of
        # T5 1.1 and mT5 contradict themselves.
        tied = "lm_head.weight" not in self.source
        head = embedding if tied else self.weight(self.vocabulary("lm_head.weight"))
        return T5(
            spec,
            embedding=embedding,
            encoder=self.stack("encoder", spec.encoder_layers, mlp=1),
            encoder_norm=self.plain_norm("encoder.final_layer_norm"),
            decoder=self.stack("decoder", spec.decoder_layers, mlp=2),
            cross=[self.cross(i) for i in range(spec.decoder_layers)],
            decoder_norm=self.plain_norm("decoder.final_layer_norm"),
            head=Linear(head),
            tied=tied,
            heads=mine.stop - mine.start,
            vocabulary=self.share(table.pieces[0].outputs),
            ranks=ranks,
        )

    def vocabulary(self, name: str) -> LinearRef:
        matrix = MatrixRef(name, self.spec.vocab_size, self.spec.hidden_size)
        return split_outputs(matrix, "vocabulary")

    def stack(self, name: str, layers: int, mlp: int) -> list[Block]:
        """Return the blocks of the encoder or decoder; their MLP is sub-layer number `mlp`."""
        spec, blocks = self.spec, list[Block]()
        for index in range(layers):
            place = f"{name}.block.{index}.layer."
            own = f"{place}0.SelfAttention."
            bias = f"{own}relative_attention_bias.weight"
            # T5 and mT5 keep one table, in the first layer; UMT5 one per layer.
            if index == 0 or bias in self.source:
                matrix = MatrixRef(bias, spec.buckets, spec.heads)
                table = self.weight(split_inputs(matrix, run_of("heads", spec.heads)))
            blocks.append(
                Block(
                    distance_bias=table,
                    norm=self.plain_norm(f"{place}0.layer_norm"),
                    qkv=self.projections(own, "qkv"),
                    output=self.output(own),
                    mlp_norm=self.plain_norm(f"{place}{mlp}.layer_norm"),
                    mlp=self.mlp(f"{place}{mlp}.DenseReluDense."),
                )
            )
        return blocks

    def cross(self, index: int) -> CrossAttention:
        place = f"decoder.block.{index}.layer.1."
        return CrossAttention(
            norm=self.plain_norm(f"{place}layer_norm"),
            query=self.projections(f"{place}EncDecAttention.", "q"),
            key_value=self.projections(f"{place}EncDecAttention.", "kv"),
            output=self.output(f"{place}EncDecAttention."),
        )

    def projections(self, prefix: str, letters: str) -> Linear:
        """Return some projections of an attention ("qkv", "q", "kv") as one linear."""
        hidden = self.spec.hidden_size
        matrices = [MatrixRef(f"{prefix}{x}.weight", self.inner, hidden) for x in letters]
        return self.linear(stack_matrices(matrices, self.heads))

    def output(self, prefix: str) -> Linear:
        matrix = MatrixRef(f"{prefix}o.weight", self.spec.hidden_size, self.inner)
        return self.linear(split_inputs(matrix, self.heads))

    def mlp(self, prefix: str) -> DenseMlp:
        spec, columns = self.spec, run_of("mlp", self.spec.mlp_width)
        shape = (spec.mlp_width, spec.hidden_size)
        names = ("wi_0", "wi_1") if spec.gated else ("wi",)
        up = [MatrixRef(f"{prefix}{name}.weight", *shape) for name in names]
        down = MatrixRef(f"{prefix}wo.weight", *shape[::-1])
        refs = MlpRefs(stack_matrices(up, columns), split_inputs(down, columns), spec.gated)
        return load_dense_mlp(self, refs, activation(spec.activation))

    def plain_norm(self, name: str) -> Norm:
        return self.norm(NormRef(f"{name}.weight", "", self.spec.hidden_size, self.spec.norm_eps))
