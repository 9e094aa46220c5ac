"""The own matrices of a layer that uses a shared block."""

from __future__ import annotations

from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    NormRef,
    run_of,
    split_outputs,
    stack_matrices,
    whole_linear,
    whole_units,
)
from tgi_trio.model.matrices.roles import LowRankRefs, SharedRefs
from tgi_trio.model.specs.decoder import DecoderSpec, SharedBlock


def shared_refs(spec: DecoderSpec, shared: SharedBlock, prefix: str, block: str) -> SharedRefs:
    """Return what the layer at `prefix` adds to the block at `block`, and what follows it."""
    names, hidden, width = spec.names, spec.hidden_size, spec.mlp_width

    def change(name: str, part: int, rows: int, columns: int) -> MatrixRef:
        place = block + name.format(shared.use)
        return MatrixRef(f"{place}.{part}.weight", rows, columns)

    qkv, rank = None, shared.attention_rank
    if rank:
        kinds = (names.query_change, names.key_change, names.value_change)
        downs = [change(name, 0, rank, 2 * hidden) for name in kinds]
        size, heads, kv_heads = spec.head_dim, spec.heads, spec.kv_heads
        ups = [change(kinds[0], 1, heads * size, rank)]
        ups += [change(name, 1, kv_heads * size, rank) for name in kinds[1:]]
        qkv = LowRankRefs(
            down=stack_matrices(downs, whole_units(rank)),
            ups=(
                split_outputs(ups[0], "heads", size),
                *(split_outputs(up, "kv_heads", size) for up in ups[1:]),
            ),
        )
    up = change(names.gate_up_change, 1, 2 * width, shared.rank)
    halves = (run_of("mlp", width), run_of("mlp", width, first=width))
    return SharedRefs(
        qkv=qkv,
        inner=LowRankRefs(
            down=whole_linear(change(names.gate_up_change, 0, shared.rank, hidden)),
            ups=(LinearRef(tuple(LinearPiece(up, h, whole_units(shared.rank)) for h in halves)),),
        ),
        exit=whole_linear(MatrixRef(f"{prefix}{names.block_exit}.weight", hidden, hidden)),
        mixer_norm=NormRef(f"{prefix}{names.mixer_norm}.weight", "", hidden, spec.norm_eps),
    )
