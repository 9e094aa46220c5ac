"""Kernels of layers that keep states, over rows of any lengths: against transformers and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.mixers import Mamba1, Mamba2
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.states import (
    convolution,
    mamba1_layer,
    mamba2_layer,
    recurrent_gate_layer,
)
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.mamba1_layer import Mamba1Layer
from tgi_trio.shard.torch_backend.states.mamba2_layer import Mamba2Layer
from tgi_trio.shard.torch_backend.states.recurrent_gate_layer import HeadGate, RecurrentGateLayer
from tgi_trio.shard.torch_backend.states.short_convolution import ShortConvolutionLayer
from tgi_trio.shard.torch_backend.states.steps import MixerLayer, StateSteps

need_triton()

HEADS, DIM, STATE, TAPS, HIDDEN, SLOTS = 4, 20, 12, 4, 24, 10
WIDTH, SHARED = HEADS * DIM, 2 * 2 * STATE  # of x; of b and c of two groups
LAUNCHING = (convolution, mamba1_layer, mamba2_layer, recurrent_gate_layer)
# Tokens of rows: shorter than a chunk and the convolution, whole chunks, and more.
LENGTHS = (1, 2, 70, 64, 1, 33)


class Case(NamedTuple):
    """A layer in a dtype, and the numbers of its states in float32."""

    make: Callable[[torch.dtype], MixerLayer]
    recurrence: tuple[int, ...]
    channels: int  # of the convolution


def some(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> torch.Tensor:
    """Return numbers that bfloat16 has, in any dtype."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.bfloat16().to(DEVICE, dtype)


def linear(outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> Linear:
    return Linear(some(outputs, inputs, seed=seed, dtype=dtype, scale=inputs**-0.5))


def convolve(channels: int, dtype: torch.dtype, bias: bool = True) -> CausalConvolution:
    kernel = some(channels, TAPS, seed=4, dtype=dtype)
    return CausalConvolution(kernel, some(channels, seed=5, dtype=dtype) if bias else None)


def mamba2(bias: bool = True, state: int = STATE, **options: Any) -> Case:
    shared = 2 * 2 * state

    def make(dtype: torch.dtype) -> Mamba2Layer:
        mixer = Mamba2(HEADS, DIM, 2, state, TAPS, 1e-5, convolution_bias=bias, **options)
        return Mamba2Layer(
            mixer,
            inner=linear(2 * WIDTH + shared + HEADS, HIDDEN, 1, dtype),
            convolution=convolve(WIDTH + shared, dtype, bias),
            rate=-some(HEADS, seed=6).exp(),
            step_bias=some(HEADS, seed=7),
            skip=some(HEADS, seed=8),
            norm=None if mixer.norm == "none" else some(WIDTH, seed=9),
            output=linear(HIDDEN, WIDTH, 2, dtype),
            ranks=None,
        )

    return Case(make, (HEADS, DIM, state), WIDTH + shared)


def mamba1(**options: Any) -> Case:
    rank = 5

    def make(dtype: torch.dtype) -> Mamba1Layer:
        mixer = Mamba1(WIDTH, STATE, rank, TAPS, **options)
        sizes = (rank, STATE, STATE)
        weighted = mixer.norm == "weighted"
        return Mamba1Layer(
            mixer,
            inner=linear(2 * WIDTH, HIDDEN, 1, dtype),
            convolution=convolve(WIDTH, dtype),
            selection=linear(sum(sizes), WIDTH, 2, dtype),
            norms=[some(n, seed=6, dtype=dtype) for n in sizes] if weighted else [],
            step=linear(WIDTH, rank, 3, dtype),
            step_bias=some(WIDTH, seed=7),
            rate=-some(STATE, WIDTH, seed=8).exp(),
            skip=some(WIDTH, seed=9),
            output=linear(HIDDEN, WIDTH, 4, dtype),
            ranks=None,
        )

    return Case(make, (STATE, WIDTH), WIDTH)


def make_gates(dtype: torch.dtype) -> RecurrentGateLayer:
    def gate(seed: int) -> HeadGate:
        weight = some(HEADS, DIM, DIM, seed=seed) * DIM**-0.5
        return HeadGate(weight, some(HEADS, DIM, seed=seed + 1))

    return RecurrentGateLayer(
        inner=linear(2 * WIDTH, HIDDEN, 1, dtype),
        activation=ACTIVATIONS["gelu_pytorch_tanh"],
        convolution=convolve(WIDTH, dtype),
        entry=gate(6),
        decay=gate(8),
        rate=functional.softplus(some(WIDTH, seed=10)),
        output=linear(HIDDEN, WIDTH, 2, dtype),
    )


def short_convolution(bias: bool) -> Case:
    def make(dtype: torch.dtype) -> ShortConvolutionLayer:
        inner, output = linear(3 * WIDTH, HIDDEN, 1, dtype), linear(HIDDEN, WIDTH, 2, dtype)
        return ShortConvolutionLayer(inner, convolve(WIDTH, dtype, bias), output)

    return Case(make, (), WIDTH)


CASES: dict[str, Case] = {
    "Mamba-2": mamba2(),
    "norm before the gate": mamba2(norm="before gate"),
    "no norm": mamba2(norm="none", bias=False),
    "bounds and multipliers": mamba2(
        least_step=0.1, most_step=1.5, multipliers=(0.5, 0.8, 1.2, 1.1, 0.9), output_multiplier=0.75
    ),
    "states in two blocks": mamba2(state=80),  # in float32, the second of which is not whole
    "Mamba": mamba1(),
    "Falcon Mamba": mamba1(norm="plain", norm_eps=1e-5),
    "Jamba": mamba1(norm="weighted", norm_eps=1e-5),
    "gates": Case(make_gates, (WIDTH,), WIDTH),
    "LFM2": short_convolution(bias=False),
    "LFM2 with biases": short_convolution(bias=True),
}


def list_steps(*lengths: int) -> StateSteps:
    """Return rows of slots of their own, every second one at its beginning."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    slots = torch.arange(1, 1 + len(lengths), device=DEVICE)
    fresh = slots % 2 == 0
    return StateSteps(starts, slots, slots, fresh, lambda arrays: [put(one) for one in arrays])


def put(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE)


def run(
    case: Case, dtype: torch.dtype, steps: StateSteps
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what a step says, and the states after it."""
    states = {"tail": some(SLOTS, TAPS - 1, case.channels, seed=11, dtype=dtype)}
    if case.recurrence:
        states["recurrence"] = some(SLOTS, *case.recurrence, seed=12)
    x = some(steps.tokens, HIDDEN, seed=13, dtype=dtype)
    layer = case.make(dtype)
    return layer.mix(layer.inner(x), states, steps), states


def launch(monkeypatch: pytest.MonkeyPatch, launches: bool) -> None:
    for module in LAUNCHING:
        monkeypatch.setattr(module, "runs_kernels", lambda _: launches)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,) * 4], ids=["prompts", "decodes"])
def test_rows_of_any_lengths_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, lengths: tuple[int, ...]
) -> None:
    """In half precision they are as near to float32 as torch's operations are."""
    steps, case, half = list_steps(*lengths), CASES[name], torch.bfloat16
    launch(monkeypatch, False)
    wanted, theirs = run(case, torch.float32, steps)
    rounded, theirs_rounded = run(case, half, steps)
    launch(monkeypatch, True)
    said, ours = run(case, torch.float32, steps)
    said_rounded, ours_rounded = run(case, half, steps)
    torch.testing.assert_close(said, wanted, atol=2e-4, rtol=2e-4)
    assert away(said_rounded, wanted) < 1.1 * away(rounded, wanted)
    for kind, right in theirs.items():
        torch.testing.assert_close(ours[kind], right, atol=2e-4, rtol=2e-4)
        assert away(ours_rounded[kind], right) <= 1.1 * away(theirs_rounded[kind], right)


def away(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far away numbers are from the right ones, on the whole."""
    return float((found.float() - right).norm())


@pytest.mark.parametrize("name", CASES)
def test_a_row_leaves_what_it_reads_where_it_writes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So a step can be repeated; and the rows say the same again."""
    launch(monkeypatch, True)
    case, steps = CASES[name], list_steps(5, 1, 40)
    elsewhere = StateSteps(steps.starts, steps.reads, steps.writes + 5, steps.fresh, steps.send)
    wanted, _ = run(case, torch.float32, steps)
    said, states = run(case, torch.float32, elsewhere)
    assert torch.equal(said, wanted)
    first = {"tail": some(SLOTS, TAPS - 1, case.channels, seed=11)}
    if case.recurrence:
        first["recurrence"] = some(SLOTS, *case.recurrence, seed=12)
    for kind, own in first.items():
        assert torch.equal(states[kind][:6], own[:6])
        assert not torch.equal(states[kind][6:9], own[6:9])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_row_of_no_numbers_leaves_its_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    launch(monkeypatch, True)
    case, steps = CASES[name], list_steps(40, 50, 1, 1)
    x = some(92, HIDDEN, seed=13)
    x[40:90] = torch.nan
    states = {"tail": some(SLOTS, TAPS - 1, case.channels, seed=11)}
    if case.recurrence:
        states["recurrence"] = some(SLOTS, *case.recurrence, seed=12)
    layer = case.make(torch.float32)
    said = layer.mix(layer.inner(x), states, steps)
    assert said[:40].isfinite().all() and said[90:].isfinite().all()
    assert said[40:90].isnan().any()
    for state in states.values():
        assert state[[1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("kind", ["Mamba-2", "Mamba"])
@pytest.mark.parametrize("lengths", [(40, 40), (1, 1)], ids=["prompts", "decodes"])
def test_small_time_steps_are_precise(
    monkeypatch: pytest.MonkeyPatch, kind: str, lengths: tuple[int, ...]
) -> None:
    """What a state gets of its tokens, where each adds a hundred-thousandth of itself."""
    found = []
    for launches in (False, True):
        launch(monkeypatch, launches)
        layer: Any = CASES[kind].make(torch.float32)
        layer.step_bias -= 12
        states = {
            "tail": some(SLOTS, TAPS - 1, CASES[kind].channels, seed=11),
            "recurrence": torch.zeros(SLOTS, *CASES[kind].recurrence, device=DEVICE),
        }
        x = some(sum(lengths), HIDDEN, seed=13)
        layer.mix(layer.inner(x), states, list_steps(*lengths))
        found.append(states["recurrence"])
    theirs, ours = found
    assert away(ours, theirs) < 1e-5 * theirs.norm()


RATES = -torch.linspace(0.5, 8, WIDTH * STATE).view(WIDTH, STATE)
ONE = 1.2784645  # SiLU of it is 1
TOKENS = 75


def test_a_mamba1_scan_is_that_of_transformers() -> None:
    from tgi_trio.shard.torch_backend.kernels.states.mamba1 import scan_mamba1

    x, dt, shared = (some(TOKENS, n, seed=n) for n in (WIDTH, WIDTH + 1, 2 * STATE))
    dt = dt[:, :WIDTH].contiguous()
    b, c = (part.t()[None] for part in shared.chunk(2, dim=-1))
    wanted = mamba_selective_scan(
        *(x.t()[None], functional.softplus(dt).t()[None], RATES.to(DEVICE), b, c)
    )[0].t()
    none, gate = torch.zeros(WIDTH, device=DEVICE), torch.full_like(x, ONE)
    found, states = torch.empty_like(x), torch.zeros(2, STATE, WIDTH, device=DEVICE)
    steps = list_steps(TOKENS)
    starts, *slots = steps.slots()
    scan_mamba1[(1, 2)](
        *(found, x, gate, dt, shared, starts, RATES.t().contiguous().to(DEVICE), none, none),
        *(states, *slots, WIDTH, WIDTH, 2 * STATE),
        **{"CHANNELS": WIDTH, "STATE": STATE, "PADDED_STATE": 16, "BLOCK": 64, "LENGTH": 8},
        DECODES=False,
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_mamba2_scan_is_that_of_transformers() -> None:
    from tgi_trio.shard.torch_backend.kernels.states.mamba2 import scan_mamba2

    mixed, dt = some(TOKENS, WIDTH + SHARED, seed=1), some(TOKENS, HEADS, seed=2)
    x, b, c = mixed[None].split((WIDTH, SHARED // 2, SHARED // 2), dim=-1)
    rate = -torch.linspace(0.5, 8, HEADS, device=DEVICE)
    grouped = (part.unflatten(-1, (2, STATE)) for part in (b, c))
    own = x.unflatten(-1, (HEADS, DIM))
    wanted = mamba2_chunk_scan(own, functional.softplus(dt)[None], rate, *grouped, chunk_size=32)[
        0
    ].view(TOKENS, WIDTH)
    none = torch.zeros(HEADS, device=DEVICE)
    states = torch.zeros(2, HEADS, DIM, STATE, device=DEVICE)
    found, (starts, *slots) = torch.empty_like(wanted), list_steps(TOKENS).slots()
    scan_mamba2[(1, HEADS, 2)](
        *(found, mixed, mixed, dt, starts, rate, none, none, states, *slots),
        *(0, HEADS, 1.0, 1.0, 0.0, float("inf")),
        **{"HEADS": HEADS, "GROUPS": 2, "DIM": DIM, "BLOCK": 16, "LENGTH": 16},
        **{
            "BLOCK_STATE": 16,
            "STATE": STATE,
            "PADDED_STATE": 16,
            "GATED": False,
            "PRECISION": "ieee",
        },
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_gates_and_their_recurrence_are_those_of_transformers() -> None:
    """Of a sequence that begins, whose first input is not scaled."""
    from tgi_trio.shard.torch_backend.kernels.states.recurrent_gate import open_gates, scan_gated

    unit = RecurrentGemmaRglru(RecurrentGemmaConfig(num_attention_heads=HEADS, lru_width=WIDTH))
    unit = unit.to(DEVICE)
    for place, parameter in enumerate(unit.parameters()):
        parameter.data = some(*parameter.shape, seed=place, scale=DIM**-0.5)
    x = some(TOKENS, WIDTH, seed=20)
    with torch.no_grad():
        wanted = unit(x[None], torch.arange(TOKENS, device=DEVICE)[None])[0]
    entered, logarithms, found = (torch.empty_like(x) for _ in range(3))
    slowest = -8.0 * functional.softplus(unit.recurrent_param.data)
    gates = (unit.input_gate_weight.data, unit.input_gate_bias.data)
    decays = (unit.recurrent_gate_weight.data, unit.recurrent_gate_bias.data)
    open_gates[(-(-TOKENS // 16), HEADS, 2)](
        *(entered, logarithms, x, *gates, *decays, slowest, TOKENS),
        **{"HEADS": HEADS, "DIM": DIM, "TOKENS": 16, "BLOCK": 16, "INPUTS": 16},
        PRECISION="ieee",
    )
    starts, slots, writes, _ = list_steps(TOKENS).slots()
    states = some(2, WIDTH, seed=21)  # which a sequence that begins does not see
    begins = torch.ones(1, dtype=torch.bool, device=DEVICE)
    scan_gated[(1, 2)](
        *(found, entered, logarithms, torch.ones_like(x), starts, states, slots, writes, begins),
        WIDTH,
        **{"CHANNELS": WIDTH, "BLOCK": 64, "LENGTH": 8, "ACT": "relu"},
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
