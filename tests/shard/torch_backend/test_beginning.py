"""Embeddings of few tokens, and what turns them, in one launch: as by launches apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import plan, sequence, tables
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.models.attending import make_tables
from tgi_trio.shard.torch_backend.models.beginning import Beginning, Begun
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

need_triton()

from tests.shard.torch_backend.stand_in_support import small_device, start  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

BF16 = torch.bfloat16
VOCAB, KEPT = 50, 40
RANDOM = torch.Generator().manual_seed(0)


class Model:
    """An embedding, scaled, and a rotation."""

    def __init__(self, size: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> None:
        self.scale = scale
        self.embedding = torch.randn((VOCAB, size), generator=RANDOM).to(DEVICE, dtype)
        spec = RotarySpec(dim=24, max_positions=KEPT)
        self.rotary = Rotary(spec, torch.device(DEVICE))
        self.rotary.keep(KEPT, dtype)
        self.beginning = Beginning(self.embedding, scale, [self.rotary])
        self.apart = 0  # how often it began by launches apart

    def begin(self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> Begun:
        self.apart += 1
        x = functional.embedding(ids, self.embedding)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype)
        return x, make_tables([self.rotary], positions, lengths, x.dtype)


@pytest.mark.parametrize(
    ("size", "scale", "dtype"),
    [(96, 1.0, BF16), (160, 59.87, BF16), (64, 0.3, torch.float32)],
)
def test_one_launch_finds_what_three_do(size: int, scale: float, dtype: torch.dtype) -> None:
    model = Model(size, scale, dtype)
    ids, places = (torch.tensor(each, device=DEVICE) for each in ([49, 0, 7], [0, 39, 3]))
    x, found = model.beginning(ids, places)
    wanted, table = model.begin(ids, places, places + 1)
    assert torch.equal(x, wanted) and x.dtype == dtype and found.keys() == {0}
    for ours, theirs in zip(found[0][:2], table[0][:2], strict=True):
        assert ours.shape == theirs.shape and torch.equal(ours, theirs)


def test_a_token_that_there_is_not_reads_nothing() -> None:
    model = Model(96)
    ids = torch.tensor([VOCAB, -1, 1 << 40, 3], device=DEVICE)
    x, _ = model.beginning(ids, torch.zeros_like(ids))
    assert not x[:3].any() and torch.equal(x[3], model.embedding[3])


def seconds_of(model: Model, took: float) -> Callable[[Callable[[], torch.Tensor]], float]:
    """Return what measures: 1 where launches are apart, else `took`."""

    def seconds(work: Callable[[], torch.Tensor]) -> float:
        before = model.apart
        work()
        return 1.0 if model.apart > before else took

    return seconds


@pytest.mark.parametrize(("took", "chosen"), [(0.9, True), (0.98, False)])
def test_few_tokens_have_it_where_it_takes_less(took: float, chosen: bool) -> None:
    model = Model(96)
    model.beginning.choose(model.begin, seconds_of(model, took))
    assert model.beginning.rows == (set(range(1, 17)) if chosen else set())
    places = torch.arange(3, device=DEVICE)
    assert model.beginning.serves(places) == chosen
    assert not model.beginning.serves(torch.arange(17, device=DEVICE))
    assert not model.beginning.serves(places.expand(3, 3))  # time, row and column
    model.beginning.choose(model.begin, seconds_of(model, 1.0))  # another warm-up
    assert not model.beginning.rows


def test_what_is_more_than_looked_up_begins_apart() -> None:
    model = Model(96)
    others = [
        Beginning(model.embedding, 1.0, []),
        Beginning(model.embedding, 1.0, [model.rotary] * 2),
        Beginning(model.embedding.float(), 1.0, [model.rotary]),  # the table is of other numbers
        Beginning(model.embedding, 1.0, [Rotary(model.rotary.spec, torch.device(DEVICE))]),
    ]
    for each in others:
        each.choose(model.begin, seconds_of(model, 0.1))
        assert not each.rows and model.apart == 0
    with pytest.raises(RuntimeError, match="no table"):
        others[0](torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def test_other_numbers_are_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Model(96)
    wrong.embedding = wrong.embedding.roll(1, 0)
    wrong.beginning.choose(wrong.begin, seconds_of(wrong, 0.1))
    assert not wrong.beginning.rows and "launches apart" in capsys.readouterr().err


def test_a_step_of_few_tokens_has_two_launches_less(checkpoint: Callable[..., Path]) -> None:
    found = []
    with small_device(checkpoint) as device:
        runner = start(checkpoint("llama"), "cuda:0")
        assert isinstance(runner, TorchRunner) and isinstance(runner.model, Decoder)
        for rows in (frozenset[int](), frozenset({2})):
            runner.model.beginning.rows = rows
            texts = [[7, 3, 5], [9, 8, 2]]
            blocks = tables(texts, shuffle=3, new=1)
            batch = [sequence(i, text, blocks[i], 1) for i, text in enumerate(texts)]
            runner.launch(plan(batch, [3, 3])).result()
            for row in batch:
                row.computed = 2
            device.counts = Counts()
            chosen = runner.launch(plan(batch, [1, 1])).result().choices
            found.append((device.counts.launches.total(), chosen.token_ids.tolist()))
    (apart, wanted), (together, ours) = found
    assert apart - together == 2 and ours == wanted
