"""Slots of states: what they take, what is copied, what a step reads and writes of them."""

from __future__ import annotations

import torch

from tgi_trio.model.specs.mixers import ShortConvolution, StateShape
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import StateSteps

SHAPES = {
    0: ShortConvolution(channels=8, taps=3).state_shapes(2),
    2: (StateShape("heads", (2, 3, 3), "float32"), StateShape("tail", (1, 4), "model")),
}


def pool(slots: int = 5) -> StatePool:
    return StatePool(SHAPES, slots, torch.bfloat16, torch.device("cpu"))


def test_a_slot_takes_what_its_shapes_say() -> None:
    found = pool()
    each = sum(shape.nbytes(2) for shapes in SHAPES.values() for shape in shapes)
    assert found.nbytes == 5 * each
    assert found.layers[0]["tail"].shape == (5, 2, 4)
    assert found.layers[2]["heads"].dtype is torch.float32
    assert found.layers[2]["tail"].dtype is torch.bfloat16


def test_states_are_copied_whole() -> None:
    found = pool()
    for layer in found.layers.values():
        for states in layer.values():
            states.copy_(torch.randn(states.shape))
    before = {key: value.clone() for key, value in found.layers[2].items()}
    found.copy(torch.tensor([1, 4]), torch.tensor([3, 2]))
    for name, states in found.layers[2].items():
        assert torch.equal(states[3], before[name][1])
        assert torch.equal(states[2], before[name][4])
        assert torch.equal(states[[0, 1, 4]], before[name][[0, 1, 4]])


def test_first_tokens_of_sequences_are_known() -> None:
    fresh = torch.tensor([True, False, True])
    slots = torch.arange(3)
    for starts, expected in (
        ([0, 2, 5, 6], [True, False, False, False, False, True]),
        ([0, 1, 2, 3], [True, False, True]),
    ):
        assert StateSteps(starts, slots, slots, fresh).begins().tolist() == expected


def test_a_step_reads_one_slot_and_writes_another() -> None:
    states = torch.randn(4, 2, 3)
    states[1] = torch.nan  # what a fresh row has never anything of
    before = states.clone()
    steps = StateSteps(
        starts=[0, 2, 3],
        reads=torch.tensor([1, 2]),
        writes=torch.tensor([1, 3]),
        fresh=torch.tensor([True, False]),
    )
    assert not steps.decodes
    read = steps.read(states)
    assert torch.equal(read[0], torch.zeros(2, 3))
    assert torch.equal(read[1], before[2])
    steps.write(states, read + 1)
    assert torch.equal(states[2], before[2])
    assert torch.equal(states[3], before[2] + 1)
    assert torch.equal(states[1], torch.ones(2, 3))
