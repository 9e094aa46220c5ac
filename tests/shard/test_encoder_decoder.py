"""T5 and its kin say what transformers says, over the step contract of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.shard.models_support import (
    BLOCK,
    GreedyRecorder,
    advance,
    generated,
    load,
    plan,
    prompts,
    run,
    sequence,
    tables,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.model_runner import TorchRunner
from tgi_trio.shard.models.t5 import T5, _DistanceBias
from tgi_trio.shard.sampler import Sampler
from tgi_trio.shard.step import Runner, Sequence, WarmupRequest

PROMPTS = prompts(8)
NEW = 24
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("t5", {}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),  # 1.1
    ("mt5", {}),
    ("umt5", {}),
    ("bart", {}),  # through transformers
)


class Golden:
    """transformers on the same folder, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForSeq2SeqLM

        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(self, prompt: list[int], **options: Any) -> tuple[list[int], torch.Tensor]:
        """Return (tokens [NEW], logits [NEW, vocab])."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        return out.sequences[0, 1:].tolist(), torch.cat(out.logits)


class Model:
    def __init__(self, folder: Path) -> None:
        self.runner, self.recorder = load(folder)
        golden = Golden(folder)
        self.expected = [golden.greedy(prompt) for prompt in PROMPTS]

    def check(self, rows: list[Sequence]) -> None:
        for row in rows:
            tokens, logits = self.expected[row.id]
            assert generated(row) == tokens
            ours = torch.stack(self.recorder.logits.pop(row.id))
            torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0.0)


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: f"{m[0]}-{len(m[1])}")
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Model:
    family, changes = request.param
    return Model(checkpoint(family, **changes))


def _rows(shuffle: int | None = None) -> list[Sequence]:
    blocks = tables(PROMPTS, shuffle, NEW)
    return [sequence(i, prompt, blocks[i], NEW) for i, prompt in enumerate(PROMPTS)]


def test_prompts_differ_and_answers_too(model: Model) -> None:
    assert len({tuple(tokens) for tokens, _ in model.expected}) > len(PROMPTS) // 2


def test_alone(model: Model) -> None:
    for row in _rows():
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
    row = sequence(6, prompt + tokens[:15], range(1, 9), new=NEW - 15)
    row.prompt_length = len(prompt)
    run(model.runner, [row], chunk=chunk)
    assert generated(row) == tokens
    model.recorder.logits.clear()


def test_a_step_may_be_repeated(model: Model) -> None:
    rows = _rows()
    counts = [row.length for row in rows]
    once = model.runner.step(plan(rows, counts))
    again = model.runner.step(plan(rows[3:6], counts[3:6]))
    assert [r.token_ids for r in once.rows[3:6]] == [r.token_ids for r in again.rows]
    model.recorder.logits.clear()


def test_what_the_router_is_told(model: Model) -> None:
    assert not model.runner.info.prefix_reuse  # an encoder's output depends on the whole prompt
    assert not model.runner.info.drafts  # so --speculate changes nothing: a step has no guesses


def test_prompt_tokens_have_no_logprobs(model: Model) -> None:
    row = sequence(5, PROMPTS[5], range(1, 20), new=2, prompt_logprobs=True)
    found: list[float] = []
    while row.length == len(PROMPTS[5]):
        count = min(10, row.length - row.computed)
        found += advance(model.runner, [row], [count])[0].prompt_logprobs
    assert len(found) == len(PROMPTS[5]) and all(map(math.isnan, found))
    model.recorder.logits.clear()


def _sampling_runner(folder: Path) -> Runner:
    runner = TorchRunner.load(folder, sampler=Sampler(512, [1], torch.device("cpu")))
    runner.warm_up(WarmupRequest(64, 256, 16, 512 * BLOCK))
    return runner


def test_penalties_look_at_the_decoder_alone(checkpoint: Checkpoint) -> None:
    folder = checkpoint("umt5")
    expected = [Golden(folder).greedy(prompt, repetition_penalty=1.5)[0] for prompt in PROMPTS[:6]]
    blocks = tables(PROMPTS, None, NEW)
    rows = [
        sequence(i, prompt, blocks[i], NEW, repetition_penalty=1.5)
        for i, prompt in enumerate(PROMPTS[:6])
    ]
    run(_sampling_runner(folder), rows)
    assert [generated(row) for row in rows] == expected


def test_seeded_sampling_is_the_same_alone_batched_and_replayed(checkpoint: Checkpoint) -> None:
    runner = _sampling_runner(checkpoint("umt5"))
    options = {"sample": True, "seed": 11, "temperature": 0.9, "top_p": 0.9}

    def fresh(index: int, said: list[int], first_block: int) -> Sequence:
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
    replayed = fresh(4, generated(alone)[:9], 40)
    run(runner, [replayed])
    assert generated(replayed) == generated(alone)
    assert len(set(generated(alone))) > 3


def test_dropping_a_row_forgets_it(checkpoint: Checkpoint) -> None:
    runner = _sampling_runner(checkpoint("umt5"))
    row = sequence(0, PROMPTS[3], range(1, 9), new=4, repetition_penalty=1.2)
    advance(runner, [row], [row.length])
    assert row.state
    runner.drop(row)
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
    torch.testing.assert_close(torch.stack(recorder.logits[0]), expected, atol=1e-4, rtol=0.0)


def test_bfloat16_stays_near(checkpoint: Checkpoint) -> None:
    folder = checkpoint("umt5")
    runner, recorder = load(folder, dtype="bfloat16")
    rows = [sequence(i, p, tables(PROMPTS)[i], new=1) for i, p in enumerate(PROMPTS)]
    run(runner, rows)
    golden = Golden(folder)
    ours = torch.cat([torch.stack(recorder.logits[row.id]) for row in rows])
    expected = torch.cat([golden.greedy(prompt)[1][:1] for prompt in PROMPTS])
    assert torch.corrcoef(torch.stack((ours.flatten(), expected.flatten())))[0, 1] > 0.99


def test_bad_checkpoints_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(checkpoint("t5"), tmp_path / "copy"))
    with pytest.raises(ModelLoadError, match="not split over shards"):
        # refused before any rank is asked for anything
        TorchRunner.load(folder, ranks=SimpleNamespace(rank=0, size=2), sampler=GreedyRecorder())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"feed_forward_proj": "odd-relu"}))
    with pytest.raises(ModelLoadError, match="'odd-relu' is neither"):
        TorchRunner.load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    name = "decoder.block.1.layer.1.EncDecAttention.k.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"'{name}' is missing"):
        TorchRunner.load(folder)


def test_weights_are_counted_once(checkpoint: Checkpoint) -> None:
    runner = TorchRunner.load(checkpoint("t5"))
    assert isinstance(runner, TorchRunner) and isinstance(runner.model, T5)
    parameters = sum(p.nbytes for p in Golden(checkpoint("t5")).model.parameters())
    assert 0.95 * parameters < runner.model.nbytes() <= parameters
