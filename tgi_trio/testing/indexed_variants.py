"""Every kind of launch around an index of tokens, for well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels import indexed_latents, latents, rotating
from tgi_trio.shard.torch_backend.layers.log_scale import count_scaled
from tgi_trio.testing.attention_variants import attend_latents
from tgi_trio.testing.variant import BF16, F32, I32, I64, U8, Variant

_DIM: Final = 128  # of index keys


class _Model(NamedTuple):
    """Sizes of a model's latent attention and of its index."""

    name: str
    heads: int
    query: int  # numbers of compressed queries, or of all queries
    rotary: int
    index_heads: int
    begin: int = 0  # of what is rotated in an index key
    pool: int = 0
    sinks: bool = False
    compresses: bool = True  # queries
    keys: int = 1  # index keys behind a latent: with those of layers that read it
    interleaved: bool = False  # pairs that turn, of the index

    @property
    def kept(self) -> int:
        """The numbers that are kept of a token for all indices."""
        return _DIM * self.keys * (2 if self.pool else 1)


_MODELS: Final = (
    _Model("DeepSeek V3.2", heads=128, query=1536, rotary=64, index_heads=64),
    _Model("GLM 5", heads=64, query=2048, rotary=64, index_heads=32),
    _Model("Hunyuan 4", heads=32, query=1536, rotary=64, index_heads=16, begin=64, sinks=True),
    _Model("GLM 5.3", heads=32, query=1536, rotary=0, index_heads=32, pool=16),
    *(
        _Model(
            f"Mistral Large 4{name}",
            heads=64,
            query=64 * 128,
            rotary=rotary,
            index_heads=32,
            compresses=False,
            keys=2,
            interleaved=True,
        )
        for name, rotary in (("", 64), (" without rotation", 0))
    ),
)


def indexed_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    for model in _MODELS:
        yield _write(model)
        for divided in (True, False):
            yield attend_latents(
                *(BF16, model.heads, True, divided, ""),
                rotary=model.rotary,
                index=model.kept,
                sinks=model.sinks,
                page=1,
            )
        if model.keys > 1:
            yield _write_keys(model)
    yield _write(_MODELS[0], "fp8_e4m3fn")
    yield Variant(
        "double_queries bf16 1536",  # A.X-K2
        latents.double_queries,
        (*(BF16,) * 4, "fp32", "i32"),
        {
            **{"SIZE": 1536, "PADDED": 2048, "KIND": "rms"},
            **{"HAS_GAIN": True, "HAS_BIAS": False},
        },
    )
    yield Variant(
        "scale_heads bf16 128",  # Mistral Large 4
        rotating.scale_heads,
        (*(BF16,) * 4, "i32"),
        {"HEADS": 64, "DIM": 128, "PADDED_DIM": 128, "BLOCK": count_scaled(128)},
    )
    for codes in ("", "fp8_e4m3fn"):
        yield Variant(
            f"average_runs bf16 16 of {_DIM}{f' {codes}' if codes else ''}",
            indexed_latents.average_runs,
            (U8 if codes else BF16, F32, BF16, *(I32,) * 5, "fp32", "i32"),
            {
                **{"DIM": _DIM, "PADDED_DIM": _DIM, "RUN": 16, "PADDED_RUN": 16},
                **{"HAS_BIAS": True, "PAGE": 16, "CODES": codes},
            },
        )


def _write(model: _Model, codes: str = "") -> Variant:
    return Variant(
        f"write_indexed_latents bf16 {model.name}{f' {codes}' if codes else ''}",
        indexed_latents.write_indexed_latents,
        (
            *(U8 if codes else BF16, *(BF16,) * 6, I64, *(BF16,) * 6),
            *(*("fp32",) * 4, "i32"),
        ),
        {
            **{"QUERY": model.query, "PADDED_QUERY": pad_dim(model.query)},
            **{"RANK": 512, "PADDED_RANK": 512},
            **{"ROTARY": model.rotary, "PADDED_ROTARY": pad_dim(model.rotary)},
            **{"WIDTH": 512 + model.rotary + model.kept, "INTERLEAVED": True},
            **{"KIND": "rms", "HAS_GAIN": True, "HAS_BIAS": False},
            **{"INDEX": _DIM, "PADDED_INDEX": _DIM, "HEADS": model.index_heads},
            **_rotation(model, "INDEX_"),
            **{"POOLS": model.pool > 0, "COMPRESSES": model.compresses, "CODES": codes},
        },
    )


def _write_keys(model: _Model) -> Variant:
    """Return what writes index keys behind the latents of another layer."""
    return Variant(
        f"write_index_keys bf16 {model.name}",
        indexed_latents.write_index_keys,
        (*(BF16,) * 4, I64, *(BF16,) * 2, *("fp32",) * 2, *("i32",) * 2),
        {"DIM": _DIM, "PADDED_DIM": _DIM, **_rotation(model), "CODES": ""},
    )


def _rotation(model: _Model, prefix: str = "") -> dict[str, Any]:
    """Return what is rotated of an index key or query."""
    begins = {"BEGIN": model.begin, f"{prefix}INTERLEAVED": model.interleaved}
    return {f"{prefix}ROTARY": model.rotary, **begins}
