"""The ways of running a transformers model over a StepPlan; see `fallback_runner.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape

Offsets = NDArray[np.int64]  # which query tokens of a row need logits
RowOutcome = torch.Tensor | str  # a row's logits [wanted, vocab], or what went wrong

_ATTENTION = "tgi_trio_paged"  # our functions' names in transformers' table
_RECORDING = "tgi_trio_recording"
_STATE = "transformers"  # our key in Sequence.state
_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ExecutionMode(Protocol):
    """One way of running a model."""

    name: str
    model: Any
    kv_bytes_per_token: int
    prefix_reuse: bool  # K and V computed for one sequence may serve another
    predicts_prompt: bool  # False: an encoder reads the prompt

    @property
    def kv_cache(self) -> KVCache | None:
        """The cache of blocks, if there is any."""
        ...

    def allocate(self, blocks: int) -> None:
        """Allocate a cache of `blocks` KV blocks; 0 frees it."""
        ...

    def forward(self, plan: StepPlan, wanted: ListLike[Offsets]) -> list[RowOutcome]:
        """Compute the plan; return one outcome per row."""
        ...

    def drop(self, sequence: ShardSequence) -> None: ...

    def undo(self) -> None:
        """Restore the model as it was before this object was made."""
        ...


class RecomputeWay:
    """Computes every row from its first token: slow, and right for any model."""

    name = "recompute"
    prefix_reuse = True  # nothing is reused, so nothing can be wrong
    predicts_prompt = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kv_bytes_per_token = 1  # nothing is kept, but the router needs a number
        self._keep = _accepts(model, "logits_to_keep")

    @property
    def kv_cache(self) -> KVCache | None:
        return None

    def allocate(self, blocks: int) -> None:
        pass

    def forward(self, plan: StepPlan, wanted: ListLike[Offsets]) -> list[RowOutcome]:
        return [self._row(plan, i, offsets) for i, offsets in enumerate(wanted)]

    def drop(self, sequence: ShardSequence) -> None:
        sequence.state.pop(_STATE, None)

    def undo(self) -> None:
        pass

    def _row(self, plan: StepPlan, index: int, offsets: Offsets) -> RowOutcome:
        """Compute one row; whatever transformers raises fails this row alone."""
        try:
            return self._logits(plan, index, offsets)
        except torch.OutOfMemoryError:
            raise  # not the row's fault
        except Exception as error:
            self.drop(plan.rows[index])
            return f"transformers failed on this sequence: {type(error).__name__}: {error}"

    def _logits(self, plan: StepPlan, index: int, offsets: Offsets) -> torch.Tensor:
        start, stop = plan.query_starts[index : index + 2].tolist()
        first = int(plan.positions[start])
        ids = plan.rows[index].token_ids[: first + stop - start].astype(np.int64)
        logits: torch.Tensor = self._call(ids, first + offsets, use_cache=False)[0]
        return logits

    def _call(self, ids: NDArray[np.int64], rows: Offsets, **options: Any) -> tuple[Any, Any]:
        """Return (logits [len(rows), vocab] of the tokens `ids` at `rows`, the model's output)."""
        device = self.model.device
        keep = torch.from_numpy(rows).to(device)
        if self._keep and len(rows):
            options["logits_to_keep"] = keep
        tokens = torch.from_numpy(ids)[None].to(device)
        out = self.model(input_ids=tokens, return_dict=True, **options)
        whole = "logits_to_keep" not in options
        return (out.logits[0].index_select(0, keep) if whole else out.logits[0]), out


class CachedWay(RecomputeWay):
    """Keeps a cache object of transformers per row, in the sequence's state.

    `single_steps`: the cache accepts further tokens only one at a time (Mamba), so each chunk of a
    prompt is computed from the prompt's start. `positions`: the model is given position ids, as
    `generate` does. Some models count positions themselves (XLNet); others, if they get none, count
    from 0 in every call (Bamba).
    """

    name = "cached"
    prefix_reuse = False  # each row has a cache of its own, outside the blocks

    def __init__(self, model: Any, cache_name: str, single_steps: bool, positions: bool) -> None:
        super().__init__(model)
        self._cache_name = cache_name
        self.single_steps = single_steps
        self.positions = positions
        self.kv_bytes_per_token = max(1, self._bytes(2) - self._bytes(1))

    @classmethod
    def try_make(
        cls, model: Any, *, single_steps: bool = False, positions: bool = True
    ) -> CachedWay | None:
        """Return this way; None for a model without a cache that works, or without positions."""
        name = find_cache_name(model)
        if name is None or (positions and not _accepts(model, "position_ids")):
            return None
        try:
            return cls(model, name, single_steps, positions)
        except torch.OutOfMemoryError:
            raise
        except _ERRORS:  # its output has no cache, or its code fails with one
            return None

    def _logits(self, plan: StepPlan, index: int, offsets: Offsets) -> torch.Tensor:
        row = plan.rows[index]
        start, stop = plan.query_starts[index : index + 2].tolist()
        first = int(plan.positions[start])
        end = first + stop - start
        # Removed first: a cache that a failed call has half filled must not be used again.
        held = row.state.pop(_STATE, None)
        known, cache = held if isinstance(held, tuple) else (0, None)
        restart = known != first  # after a shared prefix, or if this step is repeated
        if restart or (self.single_steps and end - first > 1):
            known, cache = 0, None
        options = {"use_cache": True} | ({self._cache_name: cache} if cache is not None else {})
        if self.positions:
            options["position_ids"] = torch.arange(known, end, device=self.model.device)[None]
        ids = row.token_ids[known:end].astype(np.int64)
        logits: torch.Tensor
        logits, out = self._call(ids, first - known + offsets, **options)
        row.state[_STATE] = (end, getattr(out, self._cache_name))
        return logits

    def _bytes(self, tokens: int) -> int:
        """Return the bytes of a cache of `tokens` tokens."""
        out = self._call(np.zeros(tokens, np.int64), np.zeros(1, np.int64), use_cache=True)[1]
        layers = getattr(getattr(out, self._cache_name), "layers", [])
        held = [t for layer in layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in held)


class PagedWay:
    """Runs one flat forward for all rows, over our block tables."""

    name = "paged"
    predicts_prompt = True

    def __init__(self, model: Any, layers: dict[int, AttentionLayer]) -> None:
        self.model = model
        self._layers = layers
        self._attention = ReferenceAttention()
        shape = layers[0]
        self._shape = KVShape(len(layers), shape.kv_heads, shape.head_dim)
        self.kv_bytes_per_token = self._shape.bytes_per_token(model.dtype)
        self._cache: KVCache | None = None
        self._before = model.config._attn_implementation
        self._keep = _accepts(model, "logits_to_keep")
        self.prefix_reuse = not _depends_on_length(model)
        model.set_attn_implementation(_ATTENTION)

    @classmethod
    def try_make(cls, model: Any) -> PagedWay | None:
        """Return this way; None if ours cannot replace the model's attention."""
        layers = _discover_layers(model)
        return cls(model, layers) if layers else None

    @property
    def kv_cache(self) -> KVCache | None:
        return self._cache

    def allocate(self, blocks: int) -> None:
        self._cache = None
        if blocks:
            self._cache = KVCache(self._shape, blocks, self.model.dtype, self.model.device)

    def forward(self, plan: StepPlan, wanted: ListLike[Offsets]) -> list[RowOutcome]:
        if self._cache is None:
            raise RuntimeError("PagedWay.forward before allocate")
        device = self.model.device
        starts = plan.query_starts[:-1].astype(np.int64)
        rows = np.concatenate([s + o for s, o in zip(starts, wanted, strict=True)])
        keep = torch.from_numpy(rows).to(device)
        options: dict[str, Any] = {"logits_to_keep": keep} if self._keep and len(rows) else {}
        batch = self._attention.prepare(plan, self._cache)

        def attend(
            index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            return self._attention.attend(self._layers[index], query, key, value, batch)

        out = self.model(
            input_ids=torch.from_numpy(plan.token_ids)[None].to(device),
            position_ids=torch.from_numpy(plan.positions)[None].to(device),
            use_cache=False,
            return_dict=True,
            tgi_trio_attend=attend,
            **options,
        )
        logits = out.logits[0] if options else out.logits[0].index_select(0, keep)
        return list(logits.split([len(offsets) for offsets in wanted]))

    def drop(self, sequence: ShardSequence) -> None:
        pass

    def undo(self) -> None:
        self.model.set_attn_implementation(self._before)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tgi_trio_attend: Callable[..., torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: [1, heads, T, dim] in, [1, T, heads, dim] out.

    `probe` finds out, among other things, whether a model passes `tgi_trio_attend` on to here.
    """
    flat = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    out = tgi_trio_attend(module.layer_idx, *flat)
    return out.view(1, *flat[0].shape), None


def _recording_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tgi_trio_record: dict[int, AttentionLayer | None],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Record the attention that a layer computes; None if ours does not support it."""
    known = {"scaling", "dropout", "softcap", "sliding_window", "is_causal", "position_ids"}
    strange = [name for name, value in options.items() if name in ("s_aux", "position_bias")]
    plain = not any(options[name] is not None for name in strange) and query.dim() == 4
    index = module.layer_idx
    if not plain or key.shape[-1] != value.shape[-1] or index in tgi_trio_record:
        tgi_trio_record[index] = None
    else:
        given = {name: options.get(name) for name in known}
        tgi_trio_record[index] = AttentionLayer(
            index=index,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            scale=float(given["scaling"] or query.shape[-1] ** -0.5),
            window=int(given["sliding_window"] or 0),
            soft_cap=float(given["softcap"] or 0.0),
        )
    return torch.zeros_like(query).transpose(1, 2), None


def _discover_layers(model: Any) -> dict[int, AttentionLayer] | None:
    """Return every layer's attention; None unless all are alike and ours supports them."""
    from transformers import AttentionInterface

    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return None  # transformers takes one length for the whole batch
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return None
    AttentionInterface.register(_RECORDING, _recording_attention)
    AttentionInterface.register(_ATTENTION, _paged_attention)
    record: dict[int, AttentionLayer | None] = {}
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(_RECORDING)
        ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
        model(input_ids=ids, position_ids=ids, use_cache=False, tgi_trio_record=record)
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, NotImplementedError):
        record = {}
    finally:
        model.set_attn_implementation(before)
    layers = {index: layer for index, layer in record.items() if layer is not None}
    windowed = "sliding_attention" in kinds or getattr(text, "sliding_window", None)
    complete = sorted(record) == list(range(int(getattr(text, "num_hidden_layers", 0))))
    alike = len({(la.heads, la.kv_heads, la.head_dim) for la in layers.values()}) == 1
    if not (complete and alike and len(layers) == len(record)):
        return None
    if windowed and not any(layer.window for layer in layers.values()):
        return None  # its windows exist only in masks, which our attention does not get
    return layers


def find_cache_name(model: Any) -> str | None:
    """Return the word for the cache in a model's forward and in its output; None without a cache.

    transformers has one word for all models from 5.24 on, and two before.
    """
    names = ("cache", "past_key_values", "cache_params")
    return next((name for name in names if _accepts(model, name)), None)


def _accepts(model: Any, parameter: str) -> bool:
    return parameter in inspect.signature(model.forward).parameters


def _depends_on_length(model: Any) -> bool:
    """Return whether rotary frequencies change with the length of the sequence."""
    config = model.config.get_text_config(decoder=True)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    kinds = scaling if isinstance(scaling, dict) else {}
    nested = [kinds, *(value for value in kinds.values() if isinstance(value, dict))]
    return any(each.get("rope_type") in ("dynamic", "longrope", "su") for each in nested)
