"""Drafting ahead: tokens a step and a second with and without, and how many drafts are right.

    python -m bench.model.speculation --speculate 0 2 4 8 --json bench/out/speculation.json
    python -m bench.model.speculation --speculate 0 3 --draft-model FOLDER
    python -m bench.model.speculation --speculate 0 3 --draft-model FOLDER --prompts chat strange
    python -m bench.model.speculation --speculate 0 2 --model-id FOLDER --drafter mtp

The shard's own planning, model and sampler on the embedded model (or --model-id), without rings
and router. `again` prompts hold a question, its answer and the question once more, so that the
answer repeats what is there, as edits, summaries and code do; `plain` ones hold the question. Of
the embedded model alone: `chat` prompts are held-out questions as its chat template writes them,
whose answers end by themselves; `strange` ones are English that it has never seen, the licence.
Prompts wait for a place in the batch, as in a server; the steps that count are those of a full
batch that only decodes: whose drafts are right leaves early, and would leave the others more room.
Settings take turns, so that all of them see the same machine; tokens are compared with those of
the first setting.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from bench.harness import stats
from tgi_trio.hub.resolve import resolve_drafter, resolve_model
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.settings.records import DRAFTERS
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.step_columns import StepChanges
from tgi_trio.shard.runner import Runner
from tools.demo.entries import load_heldout
from tools.demo.markup import ASSISTANT, BEGIN, END, USER

KINDS = ("again", "plain", "chat", "strange")
LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
PASSAGE = 400  # characters of a strange prompt
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
    row_steps: int = 0  # sequences in the steps that count, added up
    count: int = 0  # tokens of these steps
    decode_s: float = 0.0
    drafts: int = 0


Answer = Callable[[list[list[int]]], Run]


def prompts(kind: str, count: int, tokenizer: Tokenizer, answer: Answer) -> list[list[int]]:
    """Return token ids of `count` prompts; `answer` continues some greedily, without drafts."""
    if kind == "chat":
        asked = [question for _, question in load_heldout()]
        asked = asked[:: max(1, len(asked) // count)][:count]
        return [tokenizer.encode(BEGIN + USER + q + END + ASSISTANT).ids for q in asked]
    if kind == "strange":
        text = LICENCE.read_text(encoding="utf-8")
        begins = range(0, count * PASSAGE, PASSAGE)
        return [tokenizer.encode(BEGIN + text[i : i + PASSAGE]).ids for i in begins]
    texts = [f"{i}. {QUESTIONS[i % len(QUESTIONS)]}\n" for i in range(count)]
    plain = [tokenizer.encode(text).ids for text in texts]
    if kind == "plain":
        return plain
    answers = answer(plain).tokens
    return [[*ids, *answers[i], *ids] for i, ids in enumerate(plain)]


def make_row(
    sequence: int,
    ids: list[int],
    blocks: range,
    new: int,
    asked: SamplingParameters,
    states: StateGrant | None,
) -> PrefillRow:
    """Return a sequence of `ids` that is answered by `new` tokens at the most."""
    return PrefillRow(
        sequence=sequence,
        token_ids=np.array(ids, np.int32),
        prompt_length=len(ids),
        cached_length=0,
        block_ids=blocks,
        max_new_tokens=new,
        sampling=asked,
        states=states,
    )


def run(
    runner: Runner,
    memory: WarmupResult,
    size: int,
    encoded: list[list[int]],
    *,
    speculate: int,
    new: int,
    sample: bool,
    ends: bool = False,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Run:
    """Answer all prompts, `size` at a time; `ends`: an answer may end before `new` tokens.

    `clock`: nanoseconds; whether drafting pays is judged by it where a step does not say its own.
    """
    info = runner.info
    batch = Batch(
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        blocks=memory.blocks,
        state_slots=memory.state_slots,
        eos_ids=info.eos_ids,
        drafter=runner.drafter(speculate) if speculate else None,
        draft_budget=info.draft_budget,
        clock=clock,
    )
    need = -(-(max(map(len, encoded)) + new) // info.block_size)
    waiting = deque(enumerate(encoded))
    places = {i: range(1 + i * need, 1 + (i + 1) * need) for i in range(size)}  # KV blocks of each
    taken: dict[int, int] = {}  # sequence -> its place
    found = Run({i: [] for i in range(len(encoded))})
    while True:
        while waiting and len(taken) < size:
            i, ids = waiting.popleft()
            taken[i] = min(places.keys() - taken.values())
            asked = SamplingParameters(seed=i, sample=sample, temperature=0.7, ignore_eos=not ends)
            states = grant_states(taken[i]) if memory.state_slots else None
            batch.add(make_row(i, ids, places[taken[i]], new, asked, states))
        began = clock()
        plan = batch.plan(BUDGET)
        if plan is None:
            return found
        counts = batch.counts
        stepped = clock()
        result = runner.step(plan)
        result.forward_ns, result.sample_ns = clock() - stepped, 0
        moved = batch.settle(plan, result)
        if moved.faults:
            raise RuntimeError(moved.faults[0].message)
        if counts.decode_rows == size:
            found.row_steps += size
            found.decode_s += (clock() - began) / 1e9
            found.drafts += counts.draft_tokens
            found.count += len(moved.columns["token_ids"])
        for sequence in moved.dropped:
            runner.drop(sequence)
            del taken[sequence.id]
        for sequence_id, token_ids in tokens_of(moved):
            found.tokens[sequence_id] += token_ids


def grant_states(place: int) -> StateGrant:
    """Return the two slots of a place in the batch; slot 0 is nobody's."""
    return StateGrant((1 + 2 * place, 2 + 2 * place))


def tokens_of(moved: StepChanges) -> Iterator[tuple[int, list[int]]]:
    """Yield what each sequence got in a step."""
    columns = (moved.columns[name].tolist() for name in ("sequence", "token_count", "token_ids"))
    sequences, token_counts, token_ids = columns
    end = 0
    for sequence_id, count in zip(sequences, token_counts, strict=True):
        yield sequence_id, token_ids[end : end + count]
        end += count


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speculate", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", nargs="+", choices=KINDS, default=KINDS[:2])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3, help="prompts per place in the batch")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    parser.add_argument("--draft-model", help="heads or a smaller model that draft; else n-grams")
    parser.add_argument(
        "--drafter", choices=DRAFTERS, help="what drafts without another model; n-grams by default"
    )
    parser.add_argument("--cpu-backend", default="auto")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time of this thread alone, on a machine that does other things: one thread computes",
    )
    stats.add_output_flags(parser)
    args = parser.parse_args()
    folder = Path(resolve_model(args.model_id, None))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    draft = None if args.draft_model is None else resolve_drafter(args.draft_model)
    runner = load_runner(
        ShardSettings(
            model_path=folder,
            draft_model=draft,
            drafter=args.drafter,
            cpu_backend=args.cpu_backend,
            cpu_threads=1 if args.processor_time else 0,
        )
    )
    memory = runner.warm_up(WarmupRequest(BUDGET, 1024, 64, 32768))
    cases = [(k, b, s) for k in args.prompts for b in args.batch for s in (False, True)]
    results: list[dict[str, Any]] = []
    differing: list[int] = []  # runs of a case and a setting that gave other tokens

    def found() -> tuple[str, dict[str, Any]]:
        backend, count = runner.info.backend, sum(differing)
        words = f"{count} runs gave other tokens than the first setting; backend {backend}"
        written = {"backend": backend, "differing_runs": count, "results": results}
        return f"{stats.table_of(results)}\n{words}", written

    with stats.reporting(args.json, "model.speculation", found):
        measure(runner, memory, cases, tokenizer, args, results, differing)


def measure(
    runner: Runner,
    memory: WarmupResult,
    cases: list[tuple[str, int, bool]],
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    results: list[dict[str, Any]],
    differing: list[int],
) -> None:
    """Run every case with every setting in turns."""
    for kind, size, sample in tqdm(cases, desc="cases"):
        new = args.new_tokens
        clock = time.thread_time_ns if args.processor_time else time.perf_counter_ns
        answer = functools.partial(run, runner, memory, size, ends=kind == "chat", clock=clock)
        plainly = functools.partial(answer, speculate=0, new=new, sample=False)
        encoded = prompts(kind, args.turns * size, tokenizer, plainly)
        found: dict[int, list[Run]] = {n: [] for n in args.speculate}
        for _ in range(args.runs):
            for n in args.speculate:
                found[n].append(answer(encoded, speculate=n, new=new, sample=sample))
        first = found[args.speculate[0]][0]
        base = [r.count / r.decode_s for r in found[args.speculate[0]]]
        for n, runs in found.items():
            differing.append(sum(r.tokens != first.tokens for r in runs))
            rates = [r.count / r.decode_s for r in runs]
            ratios = [mine / other for mine, other in zip(rates, base, strict=True)]
            r = runs[0]
            results.append(
                {
                    "prompts": kind,
                    "batch": size,
                    "choice": "sampled" if sample else "greedy",
                    "speculate": n,
                    "tokens_per_step": r.count / r.row_steps,
                    "steps_saved": 1 - r.row_steps / r.count,
                    "right": (r.count - r.row_steps) / r.drafts if r.drafts else 0.0,
                    "tokens_per_s": statistics.median(rates),
                    "ratio": statistics.median(ratios),
                }
            )


if __name__ == "__main__":
    main()
