"""Heads as other tools write them, what they draft by a few lines of torch, batches that run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.shard.moved_tokens import tokens_of
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import (
    Drafter,
    DraftRow,
    Runner,
)
from tgi_trio.testing.checkpoints import make_checkpoint

BLOCK = 16
BUDGET = 64
HEADS = 3

Tensors = dict[str, torch.Tensor]


def write_heads(folder: Path, config: dict[str, Any], tensors: Tensors, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    return folder


def _random(*shape: int, seed: int, scale: float = 0.3) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def medusa(folder: Path, base: Path, hidden: int, vocab: int, *, layers: int, own: bool) -> Path:
    """As Medusa's authors and TGI have it; V1 has heads of its own."""
    tensors: Tensors = {}
    for i in range(HEADS):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = _random(hidden, hidden, seed=10 * i + j)
            tensors[f"{i}.{j}.linear.bias"] = _random(hidden, seed=100 + 10 * i + j)
        if own:
            tensors[f"{i}.{layers}.weight"] = _random(vocab, hidden, seed=200 + i)
    config = {
        "medusa_num_heads": HEADS,
        "medusa_num_layers": layers,
        "base_model_name_or_path": str(base),
    }
    return write_heads(folder, config, tensors, "medusa_lm_head.safetensors")


def vllm_medusa(folder: Path, base: Path, hidden: int, vocab: int) -> Path:
    """As vLLM has it, with heads over some tokens."""
    kept = vocab // 4
    tensors: Tensors = {"token_map": torch.arange(kept) * 3 + 5}
    for i in range(HEADS):
        tensors[f"blocks.{i}.layers.0.weight"] = _random(hidden, hidden, seed=10 * i)
        tensors[f"lm_heads.{i}.weight"] = _random(kept, hidden, seed=200 + i)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": HEADS,
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "truncated_vocab_size": kept,
        "base_model_name_or_path": str(base),
    }
    return write_heads(folder, config, tensors, "model.safetensors")


def mlp_speculator(folder: Path, base: Path, hidden: int, vocab: int, *, tied: bool) -> Path:
    """As IBM has it."""
    inner, own = 96, 1 if tied else HEADS
    tensors: Tensors = {}
    for i in range(own):
        tensors[f"speculator.emb.{i}.weight"] = _random(vocab, inner, seed=i, scale=1.0)
        tensors[f"speculator.head.{i}.weight"] = _random(vocab, inner, seed=20 + i)
        tensors[f"speculator.ln.{i}.weight"] = 1 + _random(inner, seed=40 + i)
        tensors[f"speculator.ln.{i}.bias"] = _random(inner, seed=50 + i)
    for i in range(2 if tied else HEADS):
        columns = inner if i else hidden
        tensors[f"speculator.proj.{i}.weight"] = _random(inner, columns, seed=30 + i)
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "base_model_name_or_path": str(base),
        "n_predict": HEADS,
        "inner_dim": inner,
        "emb_dim": hidden,
        "vocab_size": vocab,
        "tie_weights": tied,
        "scale_input": tied,
        "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2],
    }
    return write_heads(folder, config, tensors, "model.safetensors")


def counting_model(folder: Path, heads: Path) -> Path:
    """Write a model that says t + 1 after t, and heads that know it."""
    make_checkpoint(folder, "llama", head_dim=32, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(1))
    states = embedding / embedding.pow(2).mean(dim=1, keepdim=True).sqrt()
    tensors["model.embed_tokens.weight"] = embedding
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = states.roll(1, 0)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors.new")
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")
    own = {}
    for i in range(HEADS):
        own[f"{i}.0.linear.weight"] = torch.zeros(hidden, hidden)
        own[f"{i}.0.linear.bias"] = torch.zeros(hidden)
        own[f"{i}.1.weight"] = states.roll(2 + i, 0)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
    write_heads(heads, config, own, "medusa_lm_head.safetensors")
    return folder


def find_drafts(
    folder: Path, tensors: Tensors, hidden: torch.Tensor, token: int, near: float
) -> list[list[int]]:
    """Return what the heads draft behind `token`, best first, at most two of each head.

    Two where their logits are as `near` as rounding may bring them, in parts of the largest.
    `hidden` [features]: the state behind the final norm at which it was chosen; `tensors` have the
    model's head as "base".
    """
    config = json.loads((folder / "config.json").read_text())
    found, x = [], hidden
    if config.get("model_type") == "mlp_speculator":
        tied, inner = config["tie_weights"], config["inner_dim"]
        kept = 0.5 ** (0.5 / HEADS)
        fresh = math.sqrt((1 - kept**2) * inner / 2)
        if config["scale_input"]:
            x = x * torch.rsqrt(x.pow(2).mean() + 1e-6) / math.sqrt(2)
        for i in range(HEADS):
            own = 0 if tied else i
            projection = tensors[f"speculator.proj.{min(i, 1) if tied else i}.weight"]
            z = tensors[f"speculator.emb.{own}.weight"][token]
            x = projection @ x * kept + z * fresh
            x = x * torch.rsqrt(x.pow(2).mean() + 1e-6) * tensors[f"speculator.ln.{own}.weight"]
            x = functional.gelu(x + tensors[f"speculator.ln.{own}.bias"])
            best = (tensors[f"speculator.head.{own}.weight"] @ x).topk(2)
            found.append(_best(best.indices, best.values, near))
            token = found[-1][0]
        return found
    for i in range(HEADS):
        y, j = x, 0
        names = ("{}.{}.linear", "blocks.{}.layers.{}")
        while name := next(
            (n.format(i, j) for n in names if f"{n.format(i, j)}.weight" in tensors), ""
        ):
            y = y + functional.silu(
                functional.linear(y, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
            )
            j += 1
        head = tensors.get(f"{i}.{j}.weight", tensors.get(f"lm_heads.{i}.weight", tensors["base"]))
        best = (head @ y).topk(2)
        ids = tensors["token_map"][best.indices] if "token_map" in tensors else best.indices
        found.append(_best(ids, best.values, near))
    return found


def _best(ids: torch.Tensor, values: torch.Tensor, near: float) -> list[int]:
    """Return the best id, and the second where rounding may have decided."""
    return ids.tolist() if values[0] - values[1] < near * values[0] else ids[:1].tolist()


class Reference:
    """A model of transformers, for hidden states."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.head = self.model.lm_head.weight.detach()

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Return [features] of the last token, behind the final norm."""
        state: torch.Tensor = self.model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return state


@dataclass
class Watched:
    """A drafter that remembers what it drafted behind which tokens."""

    drafter: Drafter
    drafted: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        counts = self.drafter.draft_rows(rows, spare)
        for row in rows:
            ids, length = row.sequence.token_ids, row.sequence.length
            own = ids[length : length + counts.get(row.place, 0)].tolist()
            self.drafted.append((ids[:length].tolist(), own))
        return counts


@dataclass
class Answers:
    """What a run of a batch brought."""

    tokens: dict[int, list[int]]
    steps: int = 0
    drafts: int = 0


def start(runner: Runner, longest: int, drafter: Drafter | None) -> Batch:
    """Return a batch over memory that has been warmed up for texts of `longest` tokens."""
    info = runner.info
    room = runner.warm_up(WarmupRequest(BUDGET, longest, 16, 2048))
    return Batch(
        vocab_size=info.vocab_size,
        block_size=BLOCK,
        blocks=room.blocks,
        eos_ids=info.eos_ids,
        state_slots=room.state_slots,
        drafter=drafter,
        draft_budget=max(info.draft_budget, 8),
    )


def answer(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    asked: Sequence[SamplingParameters],
    new: int,
    *,
    drafter: Drafter | None = None,
    budget: int = BUDGET,
    longest: int = 256,
    again: int = 0,
    killed: bool = False,
) -> Answers:
    """Answer prompts in one batch, step by step as the worker does.

    No step says how long it took: drafting does not rest for what it costs here. After `again`
    steps all sequences are taken out and come back with the tokens they have by then, in the other
    order and other blocks, as after a preemption; `killed`: nothing else is left, as after a crash.
    """
    answers = Answers({i: [] for i in range(len(prompts))})

    def add(places: Sequence[int]) -> None:
        block = 1
        for i in places:
            ids, own = [*prompts[i], *answers.tokens[i]], asked[i]
            need = -(-(len(prompts[i]) + new + 8) // BLOCK)
            table = range(block, block + need)
            block += need
            left = new - len(answers.tokens[i])
            row = PrefillRow(i, np.array(ids, np.int32), len(prompts[i]), 0, table, left, 0, own)
            if runner.info.state_bytes:
                row = replace(row, states=StateGrant((1 + 2 * i, 2 + 2 * i)))
            sequence = batch.add(row)
            while own.grammar and not runner.prepare(sequence):
                pass

    batch = start(runner, longest, drafter)
    add(range(len(prompts)))
    while (plan := batch.plan(budget)) is not None:
        answers.steps += 1
        answers.drafts += batch.counts.draft_tokens
        result = replace(runner.step(plan), forward_ns=0, sample_ns=0, processor_ns=0)
        moved = batch.settle(plan, result)
        assert not moved.faults, moved.faults
        for sequence_id, token_ids in tokens_of(moved):
            answers.tokens[sequence_id] += token_ids
        for gone in moved.dropped:
            runner.drop(gone)
        if answers.steps == again:
            held = [row.id for row in batch.rows]
            for gone in batch.clear():
                runner.drop(gone)
            if killed:
                batch = start(runner, longest, drafter)
            add(held[::-1])
    return answers
