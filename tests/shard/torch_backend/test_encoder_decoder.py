"""T5 and its kin say what transformers says, over the step contract of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    advance,
    generated,
    load,
    plan,
    prompts,
    run,
    sequence,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.torch_backend.models.t5 import T5, _DistanceBias
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

PROMPTS = prompts(8)
NEW = 18  # the last of them in a second block of the decoder's
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]
Expected = list[tuple[list[int], torch.Tensor]]  # tokens and logits

T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ODD = {"vocab_size": 515}  # two ranks have 258 and 257 of the tokens
MODELS: tuple[Any, ...] = (  # family, its configuration, ranks
    ("t5", {}, 1),
    pytest.param(("t5", T5_1_1, 1), marks=pytest.mark.thorough),
    pytest.param(("mt5", {}, 1), marks=pytest.mark.thorough),
    ("umt5", {}, 1),
    ("bart", {}, 1),  # through transformers
    pytest.param(("t5", {}, 2), marks=pytest.mark.thorough),
    ("t5", T5_1_1 | ODD, 2),
    pytest.param(("umt5", {}, 2), marks=pytest.mark.thorough),  # biases in every layer
)


class Golden:
    """transformers on the same folder, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForSeq2SeqLM

        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(
        self, prompt: list[int], new: int = NEW, **options: Any
    ) -> tuple[list[int], torch.Tensor]:
        """Return (tokens [new], logits [new, vocab])."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        return out.sequences[0, 1:].tolist(), torch.cat(out.logits)


@dataclass(frozen=True)
class Model:
    runner: Runner
    recorder: GreedyRecorder
    expected: Expected  # of every prompt

    def check(self, rows: list[ShardSequence]) -> None:
        for row in rows:
            tokens, logits = self.expected[row.id]
            assert generated(row) == tokens
            ours = self.recorder.logits(row.id)
            torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0.0)
            self.recorder.drop(row)


@contextmanager
def served(folder: Path, sampler: RowSampler, ranks: int) -> Iterator[Runner]:
    """A warmed-up runner of so many ranks."""
    with ExitStack() as stack:
        if ranks > 1:
            runner: Runner = stack.enter_context(ranks_of(folder, ranks, sampler))
        else:
            runner = load_torch_runner(
                ShardSettings(model_path=folder), read_config(folder), sampler=sampler
            )
        runner.warm_up(WarmupRequest(64, 256, 16, 512 * BLOCK))
        yield runner


@pytest.fixture(scope="module")
def expected() -> Callable[[Path], Expected]:
    """Return a function folder -> what transformers says to every prompt, once for each."""
    return lru_cache(lambda folder: [Golden(folder).greedy(prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: f"{m[0]}-{len(m[1])}-{m[2]}")
def model(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, expected: Callable[[Path], Expected]
) -> Iterator[Model]:
    family, changes, ranks = request.param
    folder, recorder = checkpoint(family, **changes), GreedyRecorder()
    with served(folder, recorder, ranks) as runner:
        yield Model(runner, recorder, expected(folder))


def _rows(shuffle: int | None = None) -> list[ShardSequence]:
    return sequences(PROMPTS, shuffle, NEW)


def test_prompts_differ_and_answers_too(model: Model) -> None:
    assert len({tuple(tokens) for tokens, _ in model.expected}) > len(PROMPTS) // 2


def test_alone(model: Model) -> None:
    for row in _rows()[::3]:
        run(model.runner, [row])
        model.check([row])


def test_in_a_batch(model: Model) -> None:
    rows = _rows()
    run(model.runner, rows)
    model.check(rows)


def test_prompts_in_chunks_among_decodes_over_shuffled_blocks(model: Model) -> None:
    rows = _rows(shuffle=4)
    run(model.runner, rows, chunk=9, joins=1)
    model.check(rows)


@pytest.mark.parametrize("chunk", [1000, 7])
def test_replay_of_prompt_and_emitted_tokens(model: Model, chunk: int) -> None:
    """Preempted, or its shard died: prompt and what it said go into fresh blocks."""
    prompt, (tokens, _) = PROMPTS[6], model.expected[6]
    row = sequence(6, prompt + tokens[:7], range(1, 9), new=NEW - 7)
    row.prompt_length = len(prompt)
    run(model.runner, [row], chunk=chunk)
    assert generated(row) == tokens
    model.recorder.by_place.clear()


def test_a_step_may_be_repeated(model: Model) -> None:
    rows = _rows()
    counts = [row.length for row in rows]
    once = model.runner.step(plan(rows, counts))
    again = model.runner.step(plan(rows[3:6], counts[3:6]))
    assert [r.token_ids for r in once.rows[3:6]] == [r.token_ids for r in again.rows]
    model.recorder.by_place.clear()


def test_what_the_router_is_told(model: Model) -> None:
    assert not model.runner.info.prefix_reuse  # an encoder's output depends on the whole prompt
    assert (
        not model.runner.info.draft_budget
    )  # so --speculate changes nothing: a step has no drafts


def test_prompt_tokens_have_no_logprobs(model: Model) -> None:
    row = sequence(5, PROMPTS[5], range(1, 20), new=2, prompt_logprobs=True)
    found: list[float] = []
    while row.length == len(PROMPTS[5]):
        count = min(10, row.length - row.computed)
        found += advance(model.runner, [row], [count])[0].prompt_logprobs
    assert len(found) == len(PROMPTS[5]) and all(map(math.isnan, found))
    model.recorder.by_place.clear()


@pytest.fixture(scope="module", params=[1, 2])
def sampling_runner(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Runner]:
    sampler = Sampler(512, [1], torch.device("cpu"))
    with served(checkpoint("umt5"), sampler, request.param) as runner:
        yield runner


def test_penalties_look_at_the_decoder_alone(
    sampling_runner: Runner, checkpoint: Checkpoint
) -> None:
    golden = Golden(checkpoint("umt5"))
    expected = [golden.greedy(prompt, repetition_penalty=1.5)[0] for prompt in PROMPTS[:6]]
    rows = sequences(PROMPTS[:6], new=NEW, repetition_penalty=1.5)
    run(sampling_runner, rows)
    assert [generated(row) for row in rows] == expected


def test_seeded_sampling_is_the_same_alone_batched_and_replayed(sampling_runner: Runner) -> None:
    runner = sampling_runner
    options = {"sample": True, "seed": 11, "temperature": 0.9, "top_p": 0.9}

    def fresh(index: int, said: list[int], first_block: int) -> ShardSequence:
        ids = PROMPTS[index] + said
        blocks = range(first_block, first_block + 9)
        row = sequence(index, ids, blocks, NEW - len(said), **options)
        row.prompt_length = len(PROMPTS[index])
        return row

    alone = fresh(4, [], 1)
    run(runner, [alone])
    rows = [fresh(4, [], 10), fresh(5, [], 20), fresh(6, [], 30)]
    run(runner, rows, chunk=8, joins=1)
    assert generated(rows[0]) == generated(alone)
    replayed = fresh(4, generated(alone)[:5], 40)
    run(runner, [replayed])
    assert generated(replayed) == generated(alone)
    assert len(set(generated(alone))) > 3


def test_dropping_a_row_forgets_it(sampling_runner: Runner) -> None:
    row = sequence(0, PROMPTS[3], range(1, 9), new=4, repetition_penalty=1.2)
    advance(sampling_runner, [row], [row.length])
    assert row.state
    sampling_runner.drop(row)
    assert not row.state


def test_a_long_prompt_makes_no_square(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias by distance is made for a tile of queries at a time."""
    made: list[tuple[int, ...]] = []
    tile = _DistanceBias.tile

    def spy(self: _DistanceBias, begin: int, end: int) -> torch.Tensor:
        bias = tile(self, begin, end)
        made.append(tuple(bias.shape))
        return bias

    monkeypatch.setattr(_DistanceBias, "tile", spy)
    folder = checkpoint("t5")
    runner, recorder = load(folder)
    prompt = [3 + i % 500 for i in range(700)]
    row = sequence(0, prompt, range(1, 50), new=1)
    advance(runner, [row], [700])
    assert max(queries for _, queries, _ in made) == 256
    ids = torch.tensor([prompt])
    with torch.no_grad():
        start = torch.full((1, 1), 2)
        expected = Golden(folder).model(input_ids=ids, decoder_input_ids=start).logits[0]
    torch.testing.assert_close(recorder.logits(0), expected, atol=1e-4, rtol=0.0)


def test_bfloat16_stays_near(checkpoint: Checkpoint) -> None:
    folder = checkpoint("umt5")
    runner, recorder = load(folder, dtype="bfloat16")
    rows = sequences(PROMPTS, new=1)
    run(runner, rows)
    golden = Golden(folder)
    ours = torch.cat([recorder.logits(row.id) for row in rows])
    expected = torch.cat([golden.greedy(prompt, new=1)[1] for prompt in PROMPTS])
    assert torch.corrcoef(torch.stack((ours.flatten(), expected.flatten())))[0, 1] > 0.99


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "4 attention heads cannot be split over 3 shards.*--num-shard that divides 4"),
        ({"d_ff": 129}, 2, "129 MLP columns"),
    ],
)
def test_what_cannot_be_split_is_refused(
    checkpoint: Checkpoint, changes: dict[str, int], ranks: int, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        with ranks_of(checkpoint("t5", **changes), ranks, GreedyRecorder()):
            pass


def test_each_rank_holds_its_part(checkpoint: Checkpoint) -> None:
    whole = load_torch_runner(
        ShardSettings(model_path=checkpoint("t5")), read_config(checkpoint("t5"))
    )
    with ranks_of(checkpoint("t5"), 2, GreedyRecorder()) as halves:
        parts = [runner.model.nbytes() for runner in halves.runners]  # type: ignore[attr-defined]
        infos = [runner.info.kv_bytes_per_token for runner in halves.runners]
    assert isinstance(whole, TorchRunner)
    assert parts == [whole.model.nbytes() // 2] * 2
    assert infos == [whole.info.kv_bytes_per_token // 2] * 2


def test_bad_checkpoints_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(checkpoint("t5"), tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"feed_forward_proj": "odd-relu"}))
    with pytest.raises(ModelLoadError, match="'odd-relu' is neither"):
        load_torch_runner(ShardSettings(model_path=folder), read_config(folder))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    name = "decoder.block.1.layer.1.EncDecAttention.k.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"'{name}' is missing"):
        load_torch_runner(ShardSettings(model_path=folder), read_config(folder))


def test_weights_are_counted_once(checkpoint: Checkpoint) -> None:
    runner = load_torch_runner(
        ShardSettings(model_path=checkpoint("t5")), read_config(checkpoint("t5"))
    )
    assert isinstance(runner, TorchRunner) and isinstance(runner.model, T5)
    parameters = sum(p.nbytes for p in Golden(checkpoint("t5")).model.parameters())
    assert 0.95 * parameters < runner.model.nbytes() <= parameters
