"""Few rows and a matrix: our kernels say what the library does, and are taken where they pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.torch_backend.layers import residual
from tgi_trio.shard.torch_backend.layers.activation import Activation
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears import few_rows
from tgi_trio.shard.torch_backend.layers.linears.few_rows import Projection, project, project_normed
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import Addends

need_triton()

from tgi_trio.shard.torch_backend.recordings.cuda_graphs import CudaCapture, RecordedTime  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

BF16 = torch.bfloat16
RANDOM = torch.Generator().manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=RANDOM).to(DEVICE, dtype)


def linear(outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype = BF16) -> Linear:
    weight = numbers(outputs, inputs, dtype=torch.float32) / inputs**0.5
    return Linear(weight.to(dtype), numbers(outputs, dtype=dtype) if bias else None)


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 40])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias", "dtype"),
    [(7, 1500, True, BF16), (37, 1024, False, torch.float16), (9, 5000, False, BF16)],
)
def test_it_multiplies_as_the_library_does(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype, rows: int
) -> None:
    own = linear(outputs, inputs, bias=bias, dtype=dtype)
    x = numbers(1, rows, inputs, dtype=dtype)
    expected = x.double() @ own.weight.double().T
    if own.bias is not None:
        expected += own.bias.double()
    for _ in range(2):  # the second finds what programs count with as the first did
        found = few_rows.multiply_by_kernel(own, x)
    bits = 8 if dtype is BF16 else 11
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-bits, atol=1e-5)


def norm(kind: str, size: int) -> Norm:
    bias = numbers(size) if kind == "layer" else None
    return Norm(kind, numbers(size) * 0.1 + 1, bias, 1e-5, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    ("kind", "post", "scale", "second", "act", "bias"),
    [
        ("rms", "", 1.0, False, Gate(functional.silu), False),
        ("rms", "", 0.22, False, None, True),
        ("rms_plus_one", "rms_plus_one", 1.0, False, Gate(functional.gelu), False),
        ("layer", "", 1.0, True, functional.relu, True),
        ("", "rms", 1.0, False, Gate(functional.silu, scale=0.5), True),
        ("rms", "", 1.0, False, Gate(functional.silu, limit=1.0, paired=True), True),
    ],
)
def test_what_lies_around_a_product_is_done_in_its_launch(
    kind: str,
    post: str,
    scale: float,
    second: bool,
    act: Activation | None,
    bias: bool,
    rows: int,
) -> None:
    size = 96
    own = linear(36, size, bias=bias)
    x, first = numbers(rows, size), numbers(rows, size)
    inner = norm(post, size) if post else None
    more = numbers(rows, size) if second else None
    addends = Addends(first, more, inner, scale, second_scale=0.6)
    outer = norm(kind, size) if kind else None
    summed, out = project(own, x, addends, outer, act)
    own.fused = frozenset({rows})
    fused_sum, fused = project(own, x, addends, outer, act)
    torch.testing.assert_close(fused_sum, summed, rtol=2.0**-7, atol=1e-2)
    torch.testing.assert_close(fused, out, rtol=2.0**-6, atol=2e-2)
    own.fused = frozenset({rows + 1})  # of another number of rows
    assert torch.equal(project(own, x, addends, outer, act)[1], out)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer"])
def test_the_norm_before_a_head_is_done_in_its_launch(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    """To the bit, of one or two rows: what two launches find."""
    launched: list[str] = []
    add, multiply = residual._launch, few_rows._multiply_few

    def note_norm(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append("norm")
        return add(*given)

    def note_product(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append("product")
        return multiply(*given)

    monkeypatch.setattr(residual, "runs_kernels", lambda device: True)
    monkeypatch.setattr(residual, "_launch", note_norm)
    monkeypatch.setattr(few_rows, "_multiply_few", note_product)
    size = 96
    own, outer, x = linear(37, size, bias=kind == "layer"), norm(kind, size), numbers(rows, size)
    own.few_rows = {1: few_rows.multiply_by_kernel, 2: few_rows.multiply_by_kernel}
    apart = project_normed(own, x, outer)
    assert launched == ["norm", "product"][: 1 + (rows < 3)]
    own.fused, launched[:] = frozenset({1, 2}), []
    assert torch.equal(project_normed(own, x, outer), apart)
    assert launched == (["product"] if rows < 3 else ["norm"])


class Measuring:
    """Times by what was launched: ours takes less for matrices that have so many outputs."""

    def __init__(self, outputs: int = 0, fused: int = 0) -> None:
        self.outputs, self.fused = outputs, fused
        self.launched: list[str] = []
        self.seen: list[tuple[int, int, tuple[str, ...]]] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> float:
        self.launched.clear()
        out = work()
        rows, outputs = out.shape
        ways = tuple(sorted(set(self.launched)))
        self.seen.append((rows, outputs, ways))
        paid = {"product": self.outputs, "all": self.fused}
        return 0.5 if any(outputs == paid[way] for way in ways) else 1.0


def test_what_takes_less_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    measuring = Measuring(outputs=16, fused=24)

    def multiply(
        own: Linear,
        x: torch.Tensor,
        addends: Addends | None,
        norm: Norm | None,
        act: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        measuring.launched.append("product" if addends is None else "all")
        summed = x if addends is None else x + cast("torch.Tensor", addends.first)
        return summed, functional.linear(summed, own.weight)

    monkeypatch.setattr(few_rows, "_multiply_few", multiply)
    monkeypatch.setattr(few_rows, "CLASSES", (range(1, 2), range(2, 3)))
    wide = [linear(16, 32, bias=False) for _ in range(3)]
    gated = [linear(24, 32, bias=False) for _ in range(2)]
    others = [linear(8, 32, bias=False, dtype=d) for d in (BF16, torch.float32)]
    stranger = cast("Linear", object())  # wraps a matrix, and has no room for ours
    like = Addends(gated[0].weight)
    around = [Projection(own, None, None, like) for own in (*gated, *others)]
    few_rows.choose_for_few_rows([*wide, stranger, *gated, *others], around, measuring)
    assert [(rows, ways) for rows, outputs, ways in measuring.seen if outputs == 16] == [
        (rows, ways) for rows in (1, 2) for ways in ((), ("product",))
    ]
    assert not any(own.few_rows or own.fused for own in others)
    assert all(set(own.few_rows) == {1, 2} and not own.fused for own in wide)
    assert all(not own.few_rows and own.fused == {1, 2} for own in gated)
    measuring.launched.clear()
    for rows in (1, 2, 3):
        x = torch.zeros(rows, 32, dtype=BF16, device=DEVICE)
        wide[0](x)
        project(gated[0], x, Addends(x), None)
        project(gated[0], x, None, None)  # nothing is added: the library multiplies
        project(gated[0], x, Addends(x, factor=x[0, :1]), None)  # a launch by itself
    assert measuring.launched == ["product", "all"] * 2
    few_rows.choose_for_few_rows([*wide, *gated], around, Measuring())  # another warm-up
    assert not any(own.few_rows or own.fused for own in (*wide, *gated))


def test_a_norm_is_done_in_the_launch_of_a_head_where_that_takes_a_hundredth_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    head, outer = linear(64, 32, bias=False), norm("rms", 32)
    for took, chosen in ((0.98, {1, 2}), (0.995, set())):

        def seconds(work: Callable[[], torch.Tensor], took: float = took) -> float:
            return took if len(work()) in head.fused else 1.0

        few_rows.choose_for_few_rows([head], [Projection(head, outer, None, None)], seconds)
        assert head.fused == chosen and not head.few_rows


def test_a_product_that_finds_other_numbers_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    monkeypatch.setattr(few_rows, "CLASSES", (range(1, 2),))
    matrix, measuring = linear(16, 32, bias=False), Measuring(outputs=16, fused=16)

    def wrong(own: Linear, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        measuring.launched.append("product")
        return x, functional.linear(x, own.weight.roll(1, 0))

    monkeypatch.setattr(few_rows, "_multiply_few", wrong)
    around = [Projection(matrix, None, None, Addends(matrix.weight))]
    few_rows.choose_for_few_rows([matrix], around, measuring)
    assert measuring.launched and not matrix.few_rows and not matrix.fused
    assert "left to the library" in capsys.readouterr().err


def test_work_is_timed_as_it_is_recorded() -> None:
    device = torch.device("cuda:0")
    with StandInDevice() as stand_in:
        x = torch.zeros(4, device=device)
        seconds = RecordedTime(device, CudaCapture(device))
        assert seconds(lambda: x + 1) == 0.0
        assert stand_in.counts.recordings == 1 and stand_in.counts.replays > 1
        # That recording is gone, and with it the memory that others may share.
        assert seconds(lambda: x + 2) == 0.0


def test_nothing_is_timed_in_a_rehearsal() -> None:
    device = torch.device("cuda:0")
    with StandInDevice() as stand_in:
        x, capture = torch.zeros(4, device=device), CudaCapture(device)
        with capture.rehearsing():
            assert RecordedTime(device, capture)(lambda: x.add_(1)) == 0.0
        assert x.tolist() == [1.0] * 4  # it has run, once
        assert stand_in.counts.recordings == stand_in.counts.event_waits == 0
