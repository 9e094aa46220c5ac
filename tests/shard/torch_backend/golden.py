"""Golden answers: what transformers says of the same folder, and rows held to it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.models_support import (
    NEW_TOKENS,
    GreedyRecorder,
    advance,
    generated,
    load,
    run,
    sequence,
    sequences,
)
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner


class Golden:
    """transformers on the same folder, float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        kind: Any = AutoModelForCausalLM
        if type(AutoConfig.from_pretrained(folder)) not in kind._model_mapping:
            kind = AutoModelForImageTextToText
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(
        self, prompt: ListLike[int], new: int = NEW_TOKENS
    ) -> tuple[list[int], torch.Tensor]:
        """Return (tokens [new], logits [new, vocab]) by decoding step by step over its cache."""
        takes = inspect.signature(self.model.forward).parameters
        # The first is the word of transformers 5.24 and later.
        name = next(word for word in ("cache", "past_key_values", "cache_params") if word in takes)
        ids, tokens, logits, cache = torch.tensor([list(prompt)]), [], [], None
        for _ in range(new):
            out = self.model(input_ids=ids, use_cache=True, **{name: cache})
            cache = getattr(out, name, None)  # RecurrentGemma keeps its own, and hands out none
            logits.append(out.logits[0, -1].float())
            tokens.append(int(logits[-1].argmax()))
            last = torch.tensor([[tokens[-1]]])
            ids = torch.cat((ids, last), dim=1) if cache is None else last
        return tokens, torch.stack(logits)

    @torch.no_grad()
    def logits(self, prompt: ListLike[int], tokens: ListLike[int]) -> torch.Tensor:
        """Return the logits [len(tokens), vocab] that each of `tokens` was chosen from.

        By one forward pass over everything: where each row's best is the token that follows,
        `tokens` is the greedy continuation.
        """
        ids = torch.tensor([[*prompt, *tokens]])
        return self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()

    @torch.no_grad()
    def prompt_logprobs(self, prompt: ListLike[int]) -> list[float]:
        """Return the log-probability of every prompt token but the first."""
        ids = torch.tensor([list(prompt)])
        scores = self.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None]).squeeze(1).tolist()

    @torch.no_grad()
    def assert_prompt_tops(
        self, prompt: ListLike[int], tops: ListLike[ListLike[tuple[int, float]]], count: int
    ) -> None:
        """Check the alternatives of every prompt token; the first has none."""
        scores = self.model(input_ids=torch.tensor([list(prompt)])).logits[0, :-1].float()
        best, ids = scores.log_softmax(-1).topk(count)
        assert tops[0] == [] and [[id for id, _ in top] for top in tops[1:]] == ids.tolist()
        found = torch.tensor([[logprob for _, logprob in top] for top in tops[1:]])
        torch.testing.assert_close(found, best, atol=1e-4, rtol=0.0)


def check_prompt_logprobs(
    runner: Runner, golden: Golden, prompts: ListLike[ListLike[int]], chunk: int
) -> None:
    """Check what the first of two prompts is told of its tokens; the other asks for nothing.

    `chunk`: how many tokens of the first a step computes.
    """
    prompt = prompts[0]
    row = sequence(5, prompt, range(1, 20), new=2, prompt_logprobs=True, prompt_top_n=4)
    other = sequence(6, prompts[1], range(20, 40), new=2)
    found: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    while row.length == len(prompt):
        count = min(chunk, row.length - row.computed)
        results = advance(runner, [row, other], [count, 1])
        found += results[0].prompt_logprobs
        tops += map(list, results[0].prompt_tops)
        assert not results[1].prompt_logprobs
    assert not advance(runner, [row], [1])[0].prompt_logprobs
    assert len(found) == len(prompt) and math.isnan(found[0])
    assert found[1:] == pytest.approx(golden.prompt_logprobs(prompt), abs=1e-4)
    golden.assert_prompt_tops(prompt, tops, 4)


def assert_greedy(
    golden: Golden, recorder: GreedyRecorder, row: ShardSequence, tolerance: float = 1e-4
) -> None:
    """Check a finished row token for token, and the logits its tokens were chosen from."""
    prompt, tokens = row.token_ids[: row.prompt_length].tolist(), generated(row)
    expected = golden.logits(prompt, tokens)
    assert tokens == expected.argmax(-1).tolist()
    found = recorder.logits(row.id)[:, : expected.shape[1]]  # behind them what is never said
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def assert_as_golden(
    folder: Path,
    texts: ListLike[list[int]],
    new: int,
    *,
    backend: str = "torch",
    tolerance: float = 1e-4,
) -> None:
    """Run mixed chunks and decodes over shuffled blocks and compare with transformers."""
    runner, recorder = load(folder)
    assert runner.info.backend == backend
    rows = sequences(texts, shuffle=3, new=new)
    run(runner, rows, chunk=20, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance)
    assert len({tuple(generated(row)) for row in rows}) == len(rows)
