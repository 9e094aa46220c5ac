"""Drives a runner as the worker does, in any order, and keeps what its tokens were chosen from."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.shard.torch_backend.own_names import CASES
from tgi_trio.ipc.messages import SamplingParameters, StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import FAMILIES
from tgi_trio.shard.contract import (
    Choices,
    RowResult,
    ShardSequence,
    StepPlan,
)
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.sampling.logits_processors import Scores
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

BLOCK = 16
NEW_TOKENS = 40
# Types that transformers does not know (any more): a checkpoint of another is renamed.
RENAMED = {"baichuan", "gpt-sw3", "mimo", "RefinedWeb", "RefinedWebModel"}
RENAMED |= {name.partition(" ")[0] for name in CASES}  # `test_own_names.py`
# Types that stand in others' `text_config` alone: `test_wrappers.py`.
INNER = {
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("qwen2_5_omni_text", "qwen3_omni_moe_text"),
    *("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "mllama_text_model"),
    *("glm5_next_text", "mistral_large4_text", "muse_glimmer_text"),
    *("granite4_vision_text", "hunyuan_vl_text", "paddleocr_vl_text", "step3p5"),
    *("deepseek_ocr2_text", "granite_docling_text", "unlimited_ocr_text"),
}
IMAGED = {"idefics"}  # tested beside images: `tests/shard/media`
ALONE = sorted(FAMILIES.keys() - RENAMED - INNER - IMAGED)  # the others
# Of attention alone, tested as a batch runs them: `test_newer_families.py`.
NEWER = (
    "afmoe",
    "apertus",
    "arcee",
    "axk1",
    "axk2",
    "biogpt",
    "bitnet",
    "cohere2_moe",
    "cohere_compass_text",
    "cwm",
    "deepseek_v32",
    "deepseek_v4",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "flint",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_neo",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "hyperclovax",
    "iquestcoder",
    "jais2",
    "kolibri1",
    "laguna",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "minicpm3",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "ministral3",
    "mistral4",
    "nanochat",
    "nemotron",
    "openai-gpt",
    "persimmon",
    "sarvam_mla",
    "sarvam_moe",
    "seed_oss",
    "smollm3",
    "xglm",
    "youtu",
)
# What logits may be off by: states of a delta rule make more of rounding, with random weights.
TOLERANCES = dict.fromkeys(("kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), 2e-3)
TOLERANCES["bailing_hybrid"] = 2e-3
TOLERANCES["glm5_next"] = 1e-3  # of transformers' type of the whole model
TOLERANCES["zamba2"] = 3e-3  # transformers is 1e-3 from float64 itself


@dataclass
class GreedyRecorder:
    """A sampler that takes the best token and keeps the logits it was given, by place.

    What follows a wrong draft is chosen as well; what is decoded there later takes its place.
    """

    by_place: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def choose(self, logits: Scores, rows: list[ShardSequence]) -> Choices:
        logits = torch.as_tensor(logits)
        assert logits.dtype == torch.float32 and logits.shape[0] == len(rows)
        for row, values in zip(rows, logits, strict=True):
            self.by_place.setdefault(row.id, {})[row.length] = values.clone().cpu()
        best = logits.argmax(dim=-1).tolist()
        return Choices.of([RowResult(token_ids=[token], logprobs=[0.0]) for token in best])

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None:
        self.by_place.pop(sequence.id, None)

    def logits(self, sequence: int) -> torch.Tensor:
        """Return what the tokens of a sequence were chosen from: float32 [tokens, vocabulary]."""
        return torch.stack(list(self.by_place[sequence].values()))


def load(
    folder: Path,
    blocks: int = 512,
    *,
    device: str = "cpu",
    graph_sizes: tuple[int, ...] = (),
    **options: Any,
) -> tuple[Runner, GreedyRecorder]:
    """Return a warmed-up runner and its sampler; `options` are fields of ShardSettings."""
    sampler = GreedyRecorder()
    settings = ShardSettings(model_path=folder, **options)
    runner = load_torch_runner(
        settings,
        read_config(settings.model_path),
        device=device,
        sampler=sampler,
        graph_sizes=graph_sizes,
    )
    runner.warm_up(WarmupRequest(64, 256, 16, (blocks - 1) * BLOCK))
    return runner, sampler


def sequence(
    index: int,
    prompt: ListLike[int],
    blocks: ListLike[int],
    new: int = NEW_TOKENS,
    **sampling: object,
) -> ShardSequence:
    ids = np.zeros(len(prompt) + new, dtype=np.int32)
    ids[: len(prompt)] = prompt
    return ShardSequence(
        id=index,
        token_ids=ids,
        length=len(prompt),
        prompt_length=len(prompt),
        computed=0,
        block_ids=list(blocks),
        remaining=new,
        min_remaining=0,
        sampling=SamplingParameters(**sampling),  # type: ignore[arg-type]
    )


def plan(rows: list[ShardSequence], counts: list[int]) -> StepPlan:
    """Return the step that computes the next `counts[i]` known tokens of `rows[i]`.

    States lie in two slots for each row, in turn: `advance` takes the turns.
    """
    tokens, positions, slots, samples = [], [], [], []
    widest = max(len(row.block_ids) for row in rows)
    tables = np.zeros((len(rows), widest), dtype=np.int32)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        where = np.arange(row.computed, row.computed + count)
        table = np.array(row.block_ids)
        tables[i, : len(table)] = table
        tokens.append(row.token_ids[where])
        positions.append(where)
        slots.append(table[where // BLOCK] * BLOCK + where % BLOCK)
        samples.append(row.computed + count == row.length)
    return StepPlan(
        rows=rows,
        token_ids=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        kv_slots=np.concatenate(slots).astype(np.int64),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lengths=np.array(
            [row.computed + count for row, count in zip(rows, counts, strict=True)], np.int32
        ),
        block_tables=tables,
        samples=np.array(samples, dtype=np.bool_),
        state_reads=np.array([state_slots(row)[0] for row in rows], np.int64),
        state_writes=np.array([state_slots(row)[1] for row in rows], np.int64),
    )


def state_slots(row: ShardSequence) -> tuple[int, int]:
    """Return the slots that a row's next step reads and writes its states in."""
    return (1 + 2 * row.id, 2 + 2 * row.id) if row.states is None else row.states.slots


def drafting_plan(rows: list[ShardSequence], drafts: list[list[int]]) -> StepPlan:
    """Return the step that decodes `rows` with `drafts` of their next tokens."""
    for row, ids in zip(rows, drafts, strict=True):
        assert row.computed == row.length - 1
        row.token_ids[row.length : row.length + len(ids)] = ids
    step = plan(rows, [1 + len(ids) for ids in drafts])
    step.samples[:] = True
    step.drafts = np.array([len(ids) for ids in drafts], np.int32)
    return step


def advance(runner: Runner, rows: list[ShardSequence], counts: list[int]) -> list[RowResult]:
    """Run one step and move the sequences by it."""
    result = runner.step(plan(rows, counts))
    for row, count, got in zip(rows, counts, result.rows, strict=True):
        row.computed += count
        read, written = state_slots(row)
        row.states = StateGrant((written, read))
        assert got.fault is None, got.fault
        for token in got.token_ids:
            row.token_ids[row.length] = token
            row.length += 1
            row.remaining -= 1
    return result.rows


def run(
    runner: Runner,
    rows: list[ShardSequence],
    chunk: int = 10_000,
    joins: int | None = None,
    seed: int = 0,
) -> None:
    """Run `rows` to their ends. `chunk`: prompt tokens of a row per step, at random up to it.

    `joins`: this many rows start at each step, so prefills and decodes share steps.
    """
    draw = random.Random(seed)
    waiting = list(rows)
    running: list[ShardSequence] = []
    while waiting or running:
        take = len(waiting) if joins is None else joins
        running += waiting[:take]
        del waiting[:take]
        counts = []
        for row in running:
            left = row.length - row.computed
            counts.append(left if left <= 1 or chunk > left else draw.randint(1, min(left, chunk)))
        advance(runner, running, counts)
        running = [row for row in running if row.remaining]


def tables(
    prompts: ListLike[ListLike[int]], shuffle: int | None = None, new: int = NEW_TOKENS
) -> list[list[int]]:
    """Return block tables for the prompts and their new tokens; block 0 is in none."""
    sizes = [-(-(len(prompt) + new) // BLOCK) for prompt in prompts]
    ids = list(range(1, sum(sizes) + 1))
    if shuffle is not None:
        random.Random(shuffle).shuffle(ids)
    return [[ids.pop(0) for _ in range(size)] for size in sizes]


def sequences(
    prompts: ListLike[ListLike[int]],
    shuffle: int | None = None,
    new: int = NEW_TOKENS,
    **sampling: object,
) -> list[ShardSequence]:
    """Return a sequence for each prompt, with blocks of its own; `shuffle` as for `tables`."""
    blocks = tables(prompts, shuffle, new)
    return [sequence(i, prompt, blocks[i], new, **sampling) for i, prompt in enumerate(prompts)]


def prompts(count: int, longest: int = 70, vocab: int = 512, seed: int = 7) -> list[list[int]]:
    """Return prompts of mixed lengths, the first of them a single token."""
    draw = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 33] + [draw.randint(3, longest) for _ in range(count)]
    return [[draw.randrange(3, vocab) for _ in range(n)] for n in lengths[:count]]


def baichuan(original: Path, folder: Path, *, positions: bool = True) -> Path:
    """Write a Llama checkpoint as one of Baichuan, to which 13B models give no positions."""
    shutil.copytree(original, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "baichuan"}
    if not positions:
        del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for index in range(config["num_hidden_layers"]):
        place = f"model.layers.{index}.self_attn."
        parts = [tensors.pop(f"{place}{letter}_proj.weight") for letter in "qkv"]
        tensors[f"{place}W_pack.weight"] = torch.cat(parts)
    save_file(tensors, folder / "model.safetensors")
    return folder


def generated(row: ShardSequence) -> list[int]:
    return row.token_ids[row.prompt_length : row.length].tolist()
