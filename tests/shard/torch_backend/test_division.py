"""Every style of transformers' plans computes over ranks what a whole module computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.shard.ranks.rank_processes import groups
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.split import Portion
from tgi_trio.shard.torch_backend.fallback.division import Division, read_division
from tgi_trio.shard.torch_backend.fallback.styles import STYLES

pytestmark = pytest.mark.usefixtures("one_thread")


class Planned(torch.nn.Module):
    """A model of two alike layers, `block`, with a plan for each."""

    def __init__(self, block: Callable[[], torch.nn.Module], **plan: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList([block(), block()])
        names = {name.replace("__", "."): style for name, style in plan.items()}
        self.tp_plan = {f"layers.*.{name}".rstrip("."): style for name, style in names.items()}
        heads = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
        self.config = SimpleNamespace(model_type="planned", get_text_config=lambda decoder: heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        return torch.stack([first(x), second(x)])


class Feed(torch.nn.Module):
    """Two matrices with biases, one behind the other; `packs`: gates beside the first."""

    def __init__(self, width: int = 12, packs: int = 1) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, packs * width)
        self.down = torch.nn.Linear(width, 8)
        self.packs = packs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.up(x).chunk(self.packs, dim=-1)
        hidden = functional.silu(gates[0]) * (gates[1] if self.packs > 1 else 1.0)
        result: torch.Tensor = self.down(hidden)
        return result


class Same(torch.nn.Module):
    """Returns its input, and is summed with others'."""

    def __init__(self) -> None:
        super().__init__()
        self.alike = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0 * self.alike(x)


class Experts(torch.nn.Module):
    """Two experts, all of which compute; `turned`: matrices are [inputs, outputs]."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        first, second = (2, 24, 8), (2, 8, 12)
        if turned:
            first, second = (2, 8, 24), (2, 12, 8)
        self.gate_up = torch.nn.Parameter(torch.randn(first))
        self.down = torch.nn.Parameter(torch.randn(second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.clone if self.turned else torch.adjoint
        gate_up, down = turn(self.gate_up), turn(self.down)
        gate, up = (x @ gate_up).chunk(2, dim=-1)
        return ((functional.silu(gate) * up) @ down).sum(0)


class Mixture(torch.nn.Module):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.experts = Experts(turned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(x)
        return result


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids() -> torch.Tensor:
    return torch.arange(33).reshape(3, 11) % 11


JOINED: list[tuple[Callable[[], torch.nn.Module], dict[str, str], torch.Tensor]] = [
    (lambda: torch.nn.Linear(8, 12), {"": "colwise_gather_output"}, numbers(2, 3, 8)),
    (lambda: torch.nn.Linear(8, 11), {"": "colwise_rep"}, numbers(2, 3, 8)),
    (lambda: torch.nn.Linear(8, 5), {"": "rowwise_split_input"}, numbers(2, 3, 8)),
    (lambda: torch.nn.Linear(8, 5), {"": "rowwise_rep"}, numbers(2, 3, 8)),
    (lambda: torch.nn.Embedding(11, 6), {"": "embedding_rowwise"}, ids()),
    (lambda: torch.nn.Embedding(11, 7), {"": "embedding_colwise"}, ids()),
    (Feed, {"up": "colwise", "down": "rowwise"}, numbers(2, 3, 8)),
    (Feed, {"up": "colwise", "down": "rowwise", "down__bias": "replicate"}, numbers(2, 3, 8)),
    (lambda: Feed(12, 2), {"up": "packed_colwise", "down": "rowwise"}, numbers(2, 3, 8)),
    (Same, {"alike": "moe_identity_expert", "": "all_reduce"}, numbers(2, 3, 8)),
    (
        Mixture,
        {
            "experts__gate_up": "packed_colwise",
            "experts__down": "rowwise",
            "experts": "moe_tp_experts",
        },
        numbers(3, 8),
    ),
    (
        lambda: Mixture(turned=True),
        {
            "experts__gate_up": "packed_rowwise",
            "experts__down": "colwise",
            "experts": "moe_tp_experts",
        },
        numbers(3, 8),
    ),
    (Feed, dict.fromkeys(("up", "down"), "replicated_with_grad_allreduce"), numbers(2, 3, 8)),
    (Feed, {"up": "mla_kv_a_proj", "down": "replicate", "": "local_params"}, numbers(2, 3, 8)),
]


@pytest.mark.parametrize(
    ("block", "plan", "x"), JOINED, ids=["+".join(plan.values()) for _, plan, _ in JOINED]
)
def test_ranks_compute_what_the_whole_computes(
    block: Callable[[], torch.nn.Module], plan: dict[str, str], x: torch.Tensor
) -> None:
    model = Planned(block, **plan)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad(), groups(2) as (together, members):
        expected = model(x)

        def compute(rank: int) -> tuple[Division, torch.nn.Module, torch.Tensor]:
            own = copy.deepcopy(model)
            division = read_division(own, Portion(rank, 2))
            count = division.numbers(own)
            division.divide(own, members[rank])
            assert count == sum(p.numel() for p in own.parameters())
            with torch.no_grad():
                return division, own, own(x)

        results = together(compute)
    for division, own, found in results:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for name, parameter in own.named_parameters():
            if name not in division.parts:
                assert torch.equal(parameter, whole[name])


def test_every_style_is_tried() -> None:
    assert {style for _, plan, _ in JOINED for style in plan.values()} == STYLES.keys()


def test_a_part_has_memory_of_its_own() -> None:
    """A view would keep the whole."""
    model = Planned(Feed, up="colwise", down="rowwise")
    with groups(2) as (together, members):
        together(lambda r: read_division(copy.deepcopy(model), Portion(r, 2)))
        read_division(model, Portion(1, 2)).divide(model, members[1])
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_tied_parameters_are_cut_once_or_not_at_all() -> None:
    """A matrix that would be cut along both axes stays whole, and so does what is added to it."""
    model: Any = Planned(lambda: Feed(8), up="colwise", down="rowwise")
    first, second = model.layers
    second.up.weight = first.up.weight
    odd = copy.deepcopy(model)
    odd.layers[1].down.weight = odd.layers[1].up.weight
    with groups(2) as (_, members):
        read_division(model, Portion(1, 2)).divide(model, members[1])
    assert first.up.weight is second.up.weight and first.up.weight.shape == (4, 8)
    division = read_division(odd, Portion(1, 2))
    assert division.parts.keys() == {"layers.0.down.weight", "layers.0.down.bias"}
    assert division.styles.keys() == {"layers.0.down"}


def test_what_does_not_divide_is_named() -> None:
    model = Planned(lambda: Feed(13), up="colwise", down="rowwise")
    with pytest.raises(ModelLoadError, match=r"13 numbers of layers\.0\.up\.weight .* over 2"):
        read_division(model, Portion(0, 2))
    model = Planned(lambda: Feed(7, 2), up="packed_colwise")
    with pytest.raises(ModelLoadError, match=r"7 numbers of layers\.0\.up\.weight"):
        read_division(model, Portion(0, 2))


def test_a_style_that_nobody_knows_is_named_with_those_that_are_known() -> None:
    model = Planned(Feed, up="ep_router")
    message = r"splits layers\.0\.up by 'ep_router', .* \(all_reduce, colwise, .*--num-shard 1\."
    with pytest.raises(ModelLoadError, match=message):
        read_division(model, Portion(0, 2))
