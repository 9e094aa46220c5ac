"""Log-probabilities of prompt tokens, computed when their predecessors are prefilled.

Launching and reading are separate, so that the host need not wait for the device between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import PromptValues, StepPlan
from tgi_trio.shard.plan_parts import prompt_spans
from tgi_trio.shard.torch_backend.staging import Staging
from tgi_trio.shard.torch_backend.torch_device import runs_kernels

Bring = Callable[[torch.Tensor], torch.Tensor]  # copies to the host, waiting or not

TOTALS_BLOCK: Final = 4096  # logits that a program adds up at a time
_CHUNK_LOGITS = 1 << 24  # logits in memory at a time: 64 MiB of float32


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are in memory at a time."""
    return max(1, _CHUNK_LOGITS // max(1, vocab_size))


def bring_down(x: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; waits for the device to compute the tensor."""
    return x.cpu()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of consecutive tokens, perhaps still on their way to the host."""

    values: torch.Tensor  # float32 [n]
    top_ids: torch.Tensor | None = None  # int64 [n, best]; None: not requested
    top_values: torch.Tensor | None = None  # float32 [n, best]

    @classmethod
    def launch(
        cls,
        logits: torch.Tensor,
        targets: torch.Tensor,
        top_n: int,
        bring: Bring,
        *,
        invariant: bool,
    ) -> PromptPart:
        """Compute the values of tokens, and of the `top_n` best alternatives to each.

        `logits` float32 [n, vocab]; `targets` int64 [n] on the same device. `bring` copies results
        to the host. `invariant`: whatever the number of rows is, see `batch_invariance.py`.
        """
        totals = _find_totals(logits, invariant=invariant)
        wanted = logits.gather(1, targets[:, None]).squeeze(1)
        values = bring(wanted - totals)
        if not top_n:
            return cls(values)
        scores, ids = logits.topk(min(top_n, logits.shape[1]))
        return cls(values, bring(ids), bring(scores - totals[:, None]))

    def tops(self) -> list[list[tuple[int, float]]]:
        """Return the alternatives of each token, best first; [] if not requested."""
        if self.top_ids is None or self.top_values is None:
            return []
        pairs = zip(self.top_ids.tolist(), self.top_values.tolist(), strict=True)
        return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]


def _find_totals(logits: torch.Tensor, *, invariant: bool) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each row, float32 [n], for float32 [n, vocab]."""
    if not invariant or not runs_kernels(logits.device) or not len(logits):
        return torch.logsumexp(logits, dim=-1)
    from tgi_trio.shard.torch_backend.kernels.sampling.log_totals import (
        find_log_totals,  # imports Triton
    )

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    size, stride = logits.shape[1], logits.stride(0)
    find_log_totals[(len(logits),)](totals, logits, size, stride, BLOCK=TOTALS_BLOCK)
    return totals


@dataclass(slots=True)
class PromptSpan:
    """The values of a row's prompt tokens in a step."""

    begins: bool  # includes the first token, which nothing predicts
    unpredicted: int = 0  # tokens that nothing predicts, since an encoder reads them
    parts: list[PromptPart] = field(default_factory=list)

    def read(self) -> PromptValues:
        """Return the values; their copies to the host must have arrived."""
        values, tops = [math.nan] * self.unpredicted, list[list[tuple[int, float]]]()
        for part in self.parts:
            values += part.values.tolist()
            tops += part.tops()
        if self.begins:
            return PromptValues([math.nan, *values], [[], *tops] if tops else tops)
        return PromptValues(values, tops)


def prompt_values(
    logits: torch.Tensor, targets: torch.Tensor, top_n: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Return what `PromptPart.launch` computes, after waiting; `targets` may be on the host."""
    part = PromptPart.launch(logits, targets.to(logits.device), top_n, bring_down, invariant=False)
    return part.values.tolist(), part.tops()


class ChosenAdapters(Protocol):
    """The adapters of a step, for a head that reads some of its tokens."""

    def choosing(self, places: NDArray[np.int64]) -> AbstractContextManager[None]: ...


class PromptLogprobs:
    """Computes the values of rows that request them; memory does not grow with the prompt."""

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor] | None,
        vocab_size: int,
        device: torch.device,
        *,
        invariant: bool = False,
    ) -> None:
        """`logits` maps hidden states [n, hidden] to float32 [n, vocab].

        None: an encoder reads the prompt, so nothing predicts its tokens, and all values are NaN.
        """
        self.adapters: ChosenAdapters | None = None  # of the step
        self._logits = logits
        self._invariant = invariant
        self._chunk = rows_at_once(vocab_size)
        self._staging = Staging(device)

    def begin(self, plan: StepPlan) -> dict[int, PromptSpan]:
        """Return the values of rows that begin, by row, in a step of one token of each.

        Nothing predicts the first token of a prompt, so that no hidden states are needed.
        """
        if plan.decodes:
            return {}
        spans = prompt_spans(plan)
        return {row: PromptSpan(True) for row, (first, _) in spans.items() if first == 0}

    def launch(
        self, plan: StepPlan, hidden: torch.Tensor, bring: Bring = bring_down
    ) -> dict[int, PromptSpan]:
        """Compute the values of rows that request them and are still in their prompts, by row.

        A row that computes positions [s, e) gets the values of prompt tokens s + 1 .. e, as far as
        the prompt goes, after a NaN for token 0, which nothing predicts, if s is 0. `bring` copies
        them to the host.
        """
        spans = prompt_spans(plan)
        ids = [plan.rows[i].token_ids[a + 1 : b + 1] for i, (a, b) in spans.items()]
        if not ids:
            return {}
        (targets,) = self._staging.upload([np.concatenate(ids).astype(np.int64)])
        found, at = {}, 0
        for index, (first, end) in spans.items():
            span = found[index] = PromptSpan(first == 0)
            start, count = int(plan.query_starts[index]), end - first
            if self._logits is None:
                span.unpredicted = count
                continue
            top_n = plan.rows[index].sampling.prompt_top_n
            for begin in range(0, count, self._chunk):
                size = min(self._chunk, count - begin)
                part = np.arange(start + begin, start + begin + size)
                with nullcontext() if self.adapters is None else self.adapters.choosing(part):
                    logits = self._logits(hidden[part[0] : part[0] + size])
                own = targets[at + begin : at + begin + size]
                part_values = PromptPart.launch(
                    logits, own, top_n, bring, invariant=self._invariant
                )
                span.parts.append(part_values)
            at += count
        return found
