"""Log-probabilities of prompt tokens, computed as their predecessors are prefilled."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tgi_trio.shard.step import RowResult, StepPlan, prompt_span

_CHUNK_LOGITS = 1 << 24  # logits held at a time: 64 MiB of float32


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are held at a time."""
    return max(1, _CHUNK_LOGITS // max(1, vocab_size))


class PromptLogprobs:
    """Fills the results of rows that asked; memory does not grow with the prompt."""

    def __init__(
        self, logits: Callable[[torch.Tensor], torch.Tensor] | None, vocab_size: int
    ) -> None:
        """`logits` maps hidden states [n, hidden] to float32 [n, vocab].

        None: an encoder reads the prompt, so nothing predicts its tokens, and all values are NaN.
        """
        self._logits = logits
        self._chunk = rows_at_once(vocab_size)

    def fill(self, plan: StepPlan, hidden: torch.Tensor, results: list[RowResult]) -> None:
        """Set `prompt_logprobs` of each row that wants them and still computes its prompt.

        A row that computes positions [s, e) gets the values of prompt tokens s + 1 .. e, as far as
        the prompt goes, with a NaN in front for the token nothing predicts when s is 0.
        """
        for index, row in enumerate(plan.rows):
            span = prompt_span(plan, index)
            if span is None:
                continue
            start, (first, end) = int(plan.query_starts[index]), span
            targets = torch.from_numpy(row.token_ids[first + 1 : end + 1].astype("int64"))
            values = self._values(hidden[start : start + end - first], targets)
            results[index].prompt_logprobs = [math.nan, *values] if first == 0 else values

    def _values(self, hidden: torch.Tensor, targets: torch.Tensor) -> list[float]:
        if self._logits is None:
            return [math.nan] * len(targets)
        values: list[float] = []
        for begin in range(0, len(targets), self._chunk):
            part = slice(begin, begin + self._chunk)
            logits = self._logits(hidden[part])
            wanted = logits.gather(1, targets[part, None].to(logits.device)).squeeze(1)
            values += (wanted - torch.logsumexp(logits, dim=-1)).tolist()
        return values
