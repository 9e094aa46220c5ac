"""Builds a small twin of a transformers model: the same code and layout, random float32 weights.

Whether a way of running a model is right depends on its code and its config.json, not on its
weights. In the weights' own half precision, errors of a wrong way can hide behind rounding, and a
float32 copy of a large model does not fit into memory. So `build_twin` makes a model of the same
class from the model's own config, narrowed:

heads, widths  divided by one number, so that the dimensions of a head stay
experts        a few dozen
depth          the first layers that include every kind of layer
vocabulary     a few hundred tokens
windows        sliding windows, chunks, scan chunks and sparse indices of `REACH` tokens at most, so
               that a short probe goes beyond each

The twin must have the same kinds of layers as the model (`_kinds`). If a narrowed config cannot be
built, or loses a kind, the next, less narrow one is tried. The twin takes tens of MB and about a
second, whatever the model's size: it never has more than `_MOST_PARAMETERS`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

REACH: Final = 8  # most tokens that a window, a chunk or a sparse index of the twin spans
VOCABULARY: Final = 512
FIRST_PLAIN_TOKEN: Final = 16  # lower ids are the twin's special tokens

_MOST_PARAMETERS: Final = 200_000_000  # 0.8 GB; most twins have a hundredth of it
_NARROWEST: Final = 32  # least width of the residual stream
_LEAST_LAYERS: Final = 2
_INNER_STEP: Final = 16  # grouped products of experts need rows of a multiple of 16 bytes

_DEPTHS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
# A sparse index keeps all its heads: with few, all scores may be 0, and the choice is arbitrary.
_HEADS: Final = re.compile(r"^(?!index_).*heads$|^n_head$")
_SHARED_HEADS: Final = re.compile(r"key_value_heads$|kv_heads$|kv_n_heads$")
_WIDTHS: Final = re.compile(
    r"^(hidden_size|attention_hidden_size|input_embedding_size|output_embedding_size|d_model|n_embd"
    r"|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|lru_width|mamba_d_ssm|d_inner)$"
)
_INNER: Final = re.compile(
    r"(intermediate_size(_mlp)?|ffn(_hidden)?_(dim|size)|feed_forward_size|n_inner)$"
    r"|^(dff|dim_ff|d_ff)$"
)
_EXPERTS: Final = re.compile(r"^(num|n|moe_num)(_local|_routed)?_experts$")
_EXPERTS_KEPT: Final = 32
_SPANS: Final = re.compile(
    r"window|chunk|^index_(topk|block_size)$|^local_attention$|^(attention_)?block_size$"
    r"|^floor_scale$|_n_floor$|^rel_extent$|^compress_rates$"
)
_NOT_SPANS: Final = re.compile(r"layers|pattern|feed_forward")
_TOKEN_IDS: Final = re.compile(r"_token_(id|index)$|_token$")

_ERRORS: Final = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
    ZeroDivisionError,
    AssertionError,  # transformers checks configs with it
)


@dataclass(frozen=True)
class _Cut:
    """How a config is narrowed."""

    heads: int  # at least so many stay; 0: all, and all widths
    layers: int  # of the decoder; 0: all
    vocabulary: bool
    inner: int  # divides inner widths of MLPs further; 1: not at all, and all experts stay
    ranks: int  # among which the twin can be divided as the model is


def build_twin(model: Any, ranks: int = 1) -> Any | None:
    """Return the twin of `model` in evaluation mode, on its device; None if none can be built.

    The state of torch's global random generators is restored. The twin has the model's attention
    implementation. It is whole, also where `model` is one rank's part, and has as many heads and
    columns that so many `ranks` can divide them.
    """
    kinds, prefixes = _kinds(model)
    for cut in _cuts(prefixes, ranks):
        config = copy.deepcopy(model.config)
        try:
            _narrow(config, cut, config.get_text_config(decoder=True))
            with torch.device("meta"):
                blank = _build(model, copy.deepcopy(config))
            if sum(p.numel() for p in blank.parameters()) > _MOST_PARAMETERS:
                continue
            if _kinds(blank)[0] != kinds:
                continue
            with torch.random.fork_rng(devices=_cuda_devices(model)), torch.device(model.device):
                torch.manual_seed(0)
                twin = _build(model, config).to(model.device).eval().requires_grad_(False)
            _enliven(twin)
            if _can_run(twin):
                return twin
        except _ERRORS:
            continue
    return None


def _build(model: Any, config: Any) -> Any:
    attention = model.config._attn_implementation
    return type(model)._from_config(config, dtype=torch.float32, attn_implementation=attention)


def _can_run(twin: Any) -> bool:
    """Return whether the twin's logits are finite."""
    tokens = torch.arange(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 2 * REACH, device=twin.device)
    with torch.inference_mode():
        return bool(twin(input_ids=tokens[None], use_cache=False).logits.isfinite().all())


def _cuda_devices(model: Any) -> list[torch.device]:
    return [model.device] if model.device.type == "cuda" else []


def _cuts(prefixes: tuple[int, ...], ranks: int) -> Iterator[_Cut]:
    """Yield ways to narrow a config, the narrowest first; `prefixes` from `_kinds`.

    With two heads for each of a few ranks, some share keys and values.
    """
    each = max(ranks, min(2 * ranks, 8))
    for heads in (4, 8, 16, 0):
        for layers in (*prefixes, 0):
            for vocabulary in (True, False):
                for inner in (8, 1):
                    yield _Cut(heads and max(heads, each), layers, vocabulary, inner, ranks)


def _narrow(config: Any, cut: _Cut, text: Any) -> None:
    """Narrow a config and those nested in it, in place; only `text` loses layers."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    divisor = _divisor(values, cut.heads) if cut.heads else 1
    depth = _depth(config) if config is text and cut.layers else 0
    for name, value in values.items():
        if hasattr(value, "get_text_config"):
            _narrow(value, cut, text)
        elif isinstance(value, dict):
            setattr(config, name, _smaller_table(name, value))
        elif depth and isinstance(value, list | tuple) and len(value) == depth:
            setattr(config, name, [_smaller(name, v, cut, divisor) for v in value[: cut.layers]])
        elif depth and name in _DEPTHS and value == depth:
            setattr(config, name, cut.layers)
        elif isinstance(value, int | list) and not isinstance(value, bool):
            setattr(config, name, _smaller(name, value, cut, divisor))


def _smaller(name: str, value: Any, cut: _Cut, divisor: int) -> Any:
    """Return the narrowed value of an entry of a config."""
    if isinstance(value, list):
        return [_smaller(name, each, cut, divisor) for each in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _SPANS.search(name) and not _NOT_SPANS.search(name):
        return min(value, REACH)
    if _TOKEN_IDS.search(name):
        return value % FIRST_PLAIN_TOKEN if cut.vocabulary else value
    if "vocab" in name and cut.vocabulary and "divisible" not in name:
        return min(value, VOCABULARY)
    if _EXPERTS.search(name) and cut.inner > 1:
        return _halve(value)
    if _SHARED_HEADS.search(name):  # at least two stay if there are several, and one for each rank
        return max(min(value, max(2, cut.ranks)), value // divisor)
    if _HEADS.search(name):
        return value if value < cut.heads else value // divisor
    if _WIDTHS.search(name):
        return value // divisor
    if _INNER.search(name):
        step = _INNER_STEP * cut.ranks
        return min(value, max(value // (divisor * cut.inner) // step * step, step))
    return value


def _halve(experts: int) -> int:
    """Return a number of experts that is still divisible into groups: halved while enough stay."""
    while experts % 2 == 0 and experts // 2 >= _EXPERTS_KEPT:
        experts //= 2
    return experts


def _smaller_table(name: str, table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary of a config with narrowed spans, including those of rotary scaling."""
    if "llama_4_scaling_beta" in table:
        return table | {"original_max_position_embeddings": REACH}
    if _SPANS.search(name):
        return {k: min(v, REACH) if isinstance(v, int) else v for k, v in table.items()}
    return table


def _divisor(values: dict[str, Any], least: int) -> int:
    """Return a common divisor of heads and widths that leaves at least `least` heads."""
    counts = {n: v for n, v in values.items() if isinstance(v, int) and not isinstance(v, bool)}
    heads = [v for n, v in counts.items() if _HEADS.search(n) and not _SHARED_HEADS.search(n)]
    widths = [v for n, v in counts.items() if _WIDTHS.search(n) and v]
    if not widths:
        return 1
    heads = [v for v in heads if v >= least]
    common = math.gcd(*heads, *widths)
    most = min([*(v // least for v in heads), *(v // _NARROWEST for v in widths)])
    return next((d for d in range(max(1, most), 0, -1) if common % d == 0), 1)


def _depth(config: Any) -> int:
    return next((int(v) for n in _DEPTHS if isinstance(v := vars(config).get(n), int)), 0)


def _kinds(model: Any) -> tuple[frozenset[Any], tuple[int, ...]]:
    """Return (the kinds of layers that a model has, numbers of first layers to keep).

    A kind is the names and classes of a layer's modules, and their attributes that are strings or
    booleans, such as layer types, or spans that are set or not. The first number of layers includes
    every kind once; the second includes twice those that occur twice, for layers that share
    something. If there is no list of layers, the model as a whole is the only kind, and there are
    no numbers.
    """
    depth = _depth(model.config.get_text_config(decoder=True))
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    layers = next((found for found in lists if len(found) == depth > 0), None)
    if layers is None:
        return frozenset((type(module).__qualname__) for module in model.modules()), ()
    kinds = [_kind(layer) for layer in layers]
    places = [[i for i, kind in enumerate(kinds) if kind == each] for each in set(kinds)]
    firsts = {1 + max(where[min(n, len(where) - 1)] for where in places) for n in (0, 1)}
    return frozenset(kinds), tuple(sorted(max(n, min(_LEAST_LAYERS, depth)) for n in firsts))


def _kind(layer: torch.nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, type(module).__qualname__, tuple(sorted(_list_facts(module))))
        for name, module in layer.named_modules()
    )


def _list_facts(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, bool | str):
            yield name, str(value)
        elif isinstance(value, int) and _SPANS.search(name):
            yield name, str(value > 0)


def _enliven(model: Any) -> None:
    """Draw weights with which every part affects the logits, and hidden states grow little.

    With the initialisation for training, attention would be almost uniform and hide wrong
    positions.
    """
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            elif id(parameter) in embeddings:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
