"""Log-probabilities of prompt tokens, computed as their predecessors are prefilled."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tgi_trio.shard.contract import PromptValues, StepPlan, prompt_spans

_CHUNK_LOGITS = 1 << 24  # logits held at a time: 64 MiB of float32


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are held at a time."""
    return max(1, _CHUNK_LOGITS // max(1, vocab_size))


def prompt_values(
    logits: torch.Tensor, targets: torch.Tensor, top_n: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Return the log-probabilities of tokens, and the `top_n` best tokens in their places.

    `logits` float32 [n, vocab], `targets` [n]. The alternatives best first; [] with `top_n` 0.
    """
    totals = torch.logsumexp(logits, dim=-1)
    wanted = logits.gather(1, targets[:, None].to(logits.device)).squeeze(1)
    values: list[float] = (wanted - totals).tolist()
    if not top_n:
        return values, []
    scores, ids = logits.topk(min(top_n, logits.shape[1]))
    pairs = zip(ids.tolist(), (scores - totals[:, None]).tolist(), strict=True)
    return values, [list(zip(some, logprobs, strict=True)) for some, logprobs in pairs]


class PromptLogprobs:
    """Computes the values of rows that asked; memory does not grow with the prompt."""

    def __init__(
        self, logits: Callable[[torch.Tensor], torch.Tensor] | None, vocab_size: int
    ) -> None:
        """`logits` maps hidden states [n, hidden] to float32 [n, vocab].

        None: an encoder reads the prompt, so nothing predicts its tokens, and all values are NaN.
        """
        self._logits = logits
        self._chunk = rows_at_once(vocab_size)

    def compute(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, PromptValues]:
        """Return the values of rows that want them and still compute the prompt, by row.

        A row that computes positions [s, e) gets the values of prompt tokens s + 1 .. e, as far as
        the prompt goes, with a NaN in front for the token nothing predicts when s is 0.
        """
        found = {}
        for index, (first, end) in prompt_spans(plan).items():
            start, row = int(plan.query_starts[index]), plan.rows[index]
            targets = torch.from_numpy(row.token_ids[first + 1 : end + 1].astype("int64"))
            top_n = row.sampling.prompt_top_n
            values, tops = self._values(hidden[start : start + end - first], targets, top_n)
            if first == 0:
                values, tops = [math.nan, *values], [[], *tops] if tops else tops
            found[index] = PromptValues(values, tops)
        return found

    def _values(
        self, hidden: torch.Tensor, targets: torch.Tensor, top_n: int
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        if self._logits is None:
            return [math.nan] * len(targets), []
        values, tops = [], []
        for begin in range(0, len(targets), self._chunk):
            part = slice(begin, begin + self._chunk)
            found = prompt_values(self._logits(hidden[part]), targets[part], top_n)
            values += found[0]
            tops += found[1]
        return values, tops
