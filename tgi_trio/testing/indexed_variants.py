"""Every kind of launch around an index of tokens, for well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention import indexed_latents
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
    doubles: bool = False  # compressed queries
    hidden: int = 0  # numbers of the layer's input, if the index's queries are made of it

    @property
    def kept(self) -> int:
        """The numbers that are kept of a token for all indices."""
        return _DIM * self.keys * (2 if self.pool else 1)


_MODELS: Final = (
    _Model("DeepSeek V3.2", heads=128, query=1536, rotary=64, index_heads=64),
    _Model("GLM 5", heads=64, query=2048, rotary=64, index_heads=32),
    _Model("Hunyuan 4", heads=32, query=1536, rotary=64, index_heads=16, begin=64, sinks=True),
    _Model("GLM 5.3", heads=32, query=1536, rotary=0, index_heads=32, pool=16),
    _Model("A.X-K2", heads=64, query=1536, rotary=64, index_heads=32, doubles=True),
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
            hidden=8192,
        )
        for name, rotary in (("", 64), (" without rotation", 0))
    ),
)


def indexed_variants() -> Iterator[Variant]:
    """Yield the variants that are launched on any device."""
    for model in _MODELS:
        yield _write(model)
        for divided in () if model.doubles else (True, False):  # A.X-K2 attends as GLM 5 does
            yield attend_latents(
                *(BF16, model.heads, True, divided, ""),
                rotary=model.rotary,
                index=model.kept,
                sinks=model.sinks,
                page=1,
                scales=model.hidden > 0,
            )
        if model.keys > 1:
            yield _write_keys(model)
    yield _write(_MODELS[0], "fp8_e4m3fn")
    yield _write(_MODELS[3], "fp8_e4m3fn")


def _write(model: _Model, codes: str = "") -> Variant:
    return Variant(
        f"write_indexed_latents bf16 {model.name}{f' {codes}' if codes else ''}",
        indexed_latents.write_indexed_latents,
        (
            *(U8 if codes else BF16, *(BF16,) * 8, I64, F32, *(I32,) * 5, *(BF16,) * 8),
            *(*("fp32",) * 5, "i32"),
        ),
        {
            **{"QUERY": model.query, "PADDED_QUERY": pad_dim(model.query)},
            **{"RANK": 512, "PADDED_RANK": 512},
            **{"ROTARY": model.rotary, "PADDED_ROTARY": pad_dim(model.rotary)},
            **{"WIDTH": 512 + model.rotary + model.kept, "INTERLEAVED": True},
            **{"KIND": "rms", "HAS_GAIN": True, "HAS_BIAS": False},
            **{"INDEX": _DIM, "PADDED_INDEX": _DIM, "HEADS": model.index_heads},
            **_rotation(model, "INDEX_"),
            **{"RUN": model.pool, "PADDED_RUN": model.pool, "RUN_BIAS": model.pool > 0},
            **{"PAGE": 16, "COMPRESSES": model.compresses, "DOUBLES": model.doubles},
            **_asking(model),
            "CODES": codes,
        },
    )


def _write_keys(model: _Model) -> Variant:
    """Return what writes index keys behind the latents of another layer."""
    return Variant(
        f"write_index_keys bf16 {model.name}",
        indexed_latents.write_index_keys,
        (*(BF16,) * 6, I64, *(BF16,) * 4, *("fp32",) * 3, *("i32",) * 2),
        {"DIM": _DIM, "PADDED_DIM": _DIM, **_rotation(model), **_asking(model), "CODES": ""},
    )


def _asking(model: _Model) -> dict[str, Any]:
    """Return what an index's queries are made of, if not of compressed ones."""
    size = model.hidden
    norm = {"ASKING_KIND": "layer", "ASKING_GAIN": size > 0, "ASKING_BIAS": size > 0}
    return {"HIDDEN": size, "PADDED_HIDDEN": pad_dim(size) if size else 0, **norm}


def _rotation(model: _Model, prefix: str = "") -> dict[str, Any]:
    """Return what is rotated of an index key or query."""
    begins = {"BEGIN": model.begin, f"{prefix}INTERLEAVED": model.interleaved}
    return {f"{prefix}ROTARY": model.rotary, **begins}
