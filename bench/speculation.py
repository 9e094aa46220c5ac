"""Guessing ahead: tokens a step and a second with and without, and how many guesses are right.

    python -m bench.speculation --speculate 0 2 4 8 --json bench/out/speculation.json

The shard's own planning, model and sampler on the embedded model (or --model-id), without rings
and router. `again` prompts hold a question, its answer and the question once more, so that the
answer repeats what is there, as edits, summaries and code do; `plain` ones hold the question.
Settings take turns, so that all of them see the same machine; tokens are compared with those of
the first setting.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from bench import stats
from tgi_trio.hub import resolve_model
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StepReport
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.batch import Batch
from tgi_trio.shard.speculation.ngram import NgramDrafter
from tgi_trio.shard.step import Runner, WarmupRequest

QUESTIONS = (
    "What is continuous batching?",
    "Tell me a story about a lighthouse.",
    "How does a ring buffer work?",
    "Why do tokens matter?",
)
BUDGET = 512  # tokens a step, as a server has it by default


@dataclass
class Run:
    """What one pass over the prompts took and brought."""

    tokens: dict[int, list[int]]
    row_steps: int  # sequences in decode steps, added up
    decode_s: float
    drafts: int

    @property
    def count(self) -> int:
        """Tokens that decode steps brought: the first of each sequence comes with its prompt."""
        return sum(len(ids) - 1 for ids in self.tokens.values())


Answer = Callable[[list[list[int]]], Run]


def prompts(kind: str, count: int, tokenizer: Tokenizer, answer: Answer) -> list[list[int]]:
    """Return token ids of `count` prompts; `answer` continues some greedily, without guesses."""
    texts = [f"{i}. {QUESTIONS[i % len(QUESTIONS)]}\n" for i in range(count)]
    plain = [tokenizer.encode(text).ids for text in texts]
    if kind == "plain":
        return plain
    answers = answer(plain).tokens
    return [[*ids, *answers[i], *ids] for i, ids in enumerate(plain)]


def run(
    runner: Runner, blocks: int, encoded: list[list[int]], speculate: int, new: int, sample: bool
) -> Run:
    """Answer all prompts as one batch."""
    info = runner.info
    batch = Batch(
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        blocks=blocks,
        eos_ids=info.eos_ids,
        drafter=NgramDrafter(speculate, info.eos_ids) if speculate else None,
    )
    need = -(-(max(map(len, encoded)) + new) // info.block_size)
    for i, ids in enumerate(encoded):
        sampling = SamplingParameters(seed=i, sample=sample, temperature=0.7, ignore_eos=True)
        table = range(1 + i * need, 1 + (i + 1) * need)
        batch.add(PrefillRow(i, np.array(ids, np.int32), len(ids), 0, table, new, 0, sampling))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(encoded))}
    steps, seconds, drafts = 0, 0.0, 0
    while True:
        began = time.perf_counter()
        plan = batch.plan(BUDGET)
        if plan is None:
            break
        report = StepReport(1, 1)
        dropped, faults = batch.advance(plan, runner.step(plan), report)
        if faults:
            raise RuntimeError(faults[0].message)
        for sequence in dropped:
            runner.drop(sequence)
        if not batch.counts.prefill_tokens:
            steps += len(report.sequence)
            seconds += time.perf_counter() - began
            drafts += batch.counts.draft_tokens
        end = 0
        for sequence_id, count in zip(report.sequence, report.token_count, strict=True):
            tokens[sequence_id] += report.token_ids[end : end + count]
            end += count
    return Run(tokens, steps, seconds, drafts)


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculate", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    parser.add_argument("--cpu-backend", default="auto")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    folder = Path(resolve_model(args.model_id, None))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    runner = load_runner(folder, cpu_backend=args.cpu_backend)
    blocks = runner.warm_up(WarmupRequest(BUDGET, 1024, 64, 32768)).blocks
    cases = [(k, b, s) for k in ("again", "plain") for b in args.batch for s in (False, True)]
    results, differing = [], 0
    for kind, size, sample in tqdm(cases, desc="cases"):
        new = args.new_tokens
        answer = functools.partial(run, runner, blocks, speculate=0, new=new, sample=False)
        encoded = prompts(kind, size, tokenizer, answer)
        found: dict[int, list[Run]] = {n: [] for n in args.speculate}
        for _ in range(args.runs):
            for n in args.speculate:
                found[n].append(run(runner, blocks, encoded, n, new, sample))
        first = found[args.speculate[0]][0]
        base = statistics.median(r.count / r.decode_s for r in found[args.speculate[0]])
        for n, runs in found.items():
            differing += sum(r.tokens != first.tokens for r in runs)
            rate = statistics.median(r.count / r.decode_s for r in runs)
            r = runs[0]
            results.append(
                {
                    "prompts": kind,
                    "batch": size,
                    "choice": "sampled" if sample else "greedy",
                    "speculate": n,
                    "tokens_per_step": r.count / r.row_steps,
                    "steps_saved": 1 - r.row_steps / first.row_steps,
                    "right": (r.count - r.row_steps) / r.drafts if r.drafts else 0.0,
                    "tokens_per_s": rate,
                    "ratio": rate / base,
                }
            )
    columns = tuple(results[0])
    print(stats.table(columns, [tuple(row.values()) for row in results]))
    print(
        f"{differing} runs gave other tokens than the first setting; backend {runner.info.backend}"
    )
    stats.write_json(
        args.json,
        "speculation",
        {"backend": runner.info.backend, "differing_runs": differing, "results": results},
    )


if __name__ == "__main__":
    main()
