"""What flash-attn's kernel is given, shown to a stand-in with the kernel's published meaning."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.attention_cases import HEADS, KINDS, KV_HEADS, attended
from tgi_trio.shard.torch_backend.attention import choice
from tgi_trio.shard.torch_backend.attention.choice import capturable_attention, choose_attention
from tgi_trio.shard.torch_backend.attention.flash import FlashAttention
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.kv_cache import KVShape, KVSize
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads, HeadLaunch

SHAPE = KVShape(2, KV_HEADS, 64)


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    **sizes: Any,
) -> torch.Tensor:
    """flash_attn_varlen_func as its documentation describes it, in plain torch, causal."""
    assert sizes["causal"] and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert sizes["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
    assert sizes["max_seqlen_k"] == int(cu_seqlens_k.diff().max())
    parts = []
    spans = zip(cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True)
    for (q0, q1), (k0, k1) in spans:
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * behind.abs()
        hidden = behind < 0
        if window_size[0] >= 0:
            hidden = hidden | (behind > window_size[0])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)


class Asked:
    """A kernel, and how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.times += 1
        return kernel(*args, **kwargs)


def flash(asked: Asked) -> FlashAttention:
    return FlashAttention(asked, ReferenceAttention(), torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_whole_prompts_agree_with_plain_torch(kind: dict[str, Any]) -> None:
    """What the kernel knows nothing of goes elsewhere."""
    sizes, asked = ([40, 1, 17, 33], [40, 1, 17, 33]), Asked()
    ours = attended(flash(asked), *sizes, **kind)
    assert asked.times == (0 if "sinks" in kind or "chunk" in kind else 1)
    torch.testing.assert_close(
        ours, attended(ReferenceAttention(), *sizes, **kind), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("shape", [{"dim": 320}, {"dim": 24, "value": 16}], ids=str)
def test_layers_whose_heads_it_does_not_hold_go_elsewhere(shape: dict[str, Any]) -> None:
    asked, sizes = Asked(), ([40, 17], [40, 17])
    torch.testing.assert_close(
        attended(flash(asked), *sizes, **shape), attended(ReferenceAttention(), *sizes, **shape)
    )
    assert asked.times == 0


@pytest.mark.parametrize("counts", [[1, 1], [40, 6]], ids=["decodes", "a chunk among them"])
def test_steps_that_read_the_cache_go_elsewhere(counts: list[int]) -> None:
    asked, sizes = Asked(), ([40, 17], counts)
    torch.testing.assert_close(
        attended(flash(asked), *sizes), attended(ReferenceAttention(), *sizes)
    )
    assert asked.times == 0


class Beside(BesideHeads):
    """Counts how often it is computed."""

    times = 0

    @property
    def joins(self) -> bool:
        return False

    def _compute(self) -> torch.Tensor:
        self.times += 1
        return torch.zeros(1)

    def _launch_with(self, heads: HeadLaunch) -> torch.Tensor:
        raise AssertionError("it joins nothing")


class Projected:
    """Attends from projections, which are queries, keys and values already."""

    def __init__(self, attention: FlashAttention, beside: BesideHeads) -> None:
        self._attention, self._beside = attention, beside
        self.prepare = attention.prepare

    def attend(self, layer: AttentionLayer, *given: Any) -> torch.Tensor:
        *heads, batch = given
        steps: Any = SimpleNamespace(split=lambda qkv, table: heads)
        return self._attention.attend_projected(
            layer, heads[0], steps, None, batch, beside=self._beside
        )


@pytest.mark.parametrize("counts", [[40, 17], [40, 6]], ids=["whole", "a chunk among them"])
def test_what_is_beside_heads_is_computed_once(counts: list[int]) -> None:
    beside, asked = Beside(), Asked()
    projected: Any = Projected(flash(asked), beside)
    wanted = attended(ReferenceAttention(), [40, 17], counts)
    torch.testing.assert_close(attended(projected, [40, 17], counts), wanted)
    assert beside.times == 1 and asked.times == (counts == [40, 17])


def test_where_it_is_installed_it_stands_before_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(choice, "capturable_attention", lambda device, shape, **_: None)
    device, half = torch.device("cuda:0"), torch.bfloat16
    monkeypatch.setattr("tgi_trio.shard.torch_backend.attention.flash.Staging", lambda device: None)
    small, large, narrow = KVSize(4, 256, 256), KVSize(1, 512, 512), KVSize(4, 192, 128)
    for shape in (SHAPE, KVShape.of([small, large])):  # it has the layers that it holds
        assert choose_attention(device, half, shape).name == "flash-attn"
    others = KVShape(2, 1, 576, same=True), KVShape.of([large]), KVShape.of([narrow])
    for dtype, shape in ((torch.float32, SHAPE), *((half, shape) for shape in others)):
        assert choose_attention(device, dtype, shape).name == "torch"


def test_a_cpu_gets_plain_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_attention(torch.device("cpu"), dtype, SHAPE).name == "torch"
    assert capturable_attention(torch.device("cpu"), SHAPE) is None
