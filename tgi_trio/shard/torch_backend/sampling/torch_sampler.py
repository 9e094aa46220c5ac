"""Choosing the next token of every row, in TGI's order.

watermark, repetition penalty, frequency and presence penalty, logit bias, EOS held back until
min_new_tokens, grammar mask, temperature, top-k, top-p, typical-p, min-p, then the choice. The
log-probabilities reported are those of the processed scores: a token that alone survived has 0.

A row's outcome is a function of its own scores, tokens and parameters, bit for bit: every sum over
a row runs in an order that neither the batch's size nor its other rows change, and the random
number is a function of (seed, position). Rows are computed together; those that are cut (top-k
and so on) and those that are not take different ways, so mixing settings costs no row the other
way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tgi_trio.shard.contract import Choices, ShardSequence
from tgi_trio.shard.sampling import logits_processors as processors
from tgi_trio.shard.sampling.base import (
    MOST_TIES,
    Choice,
    SamplerBase,
    SamplingSettings,
    alternatives,
    choose_among_best,
    uniforms,
    why_not,
)
from tgi_trio.shard.sampling.gaps import Gaps
from tgi_trio.shard.sampling.logits_processors import Scores
from tgi_trio.shard.sampling.truncation import Floats, Ints
from tgi_trio.shard.torch_backend.sampling.rowwise import (
    CHUNK,
    candidates,
    draw,
    first_largest,
    largest,
    mass_and_entropy,
    masses,
    select,
    to_numpy,
)
from tgi_trio.shard.torch_backend.sampling.wide_truncation import truncate_row

# Scores handled at a time. On a CPU, larger temporaries would be mapped and faulted in every step.
_BLOCK = {"cpu": 2**22, "other": 2**27}


class Sampler(SamplerBase):
    """Chooses next tokens with torch, on any device."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        *,
        grammars: processors.GrammarMasks | None = None,
        watermark: processors.Watermark | None = None,
    ) -> None:
        """`grammars` and `watermark` as for `SamplerBase`."""
        super().__init__(
            vocab_size, eos_ids, permutation=permutation, grammars=grammars, watermark=watermark
        )
        self._device = device
        elements = _BLOCK["cpu" if device.type == "cpu" else "other"]
        self._block_rows = max(1, elements // vocab_size)

    @torch.inference_mode()
    def choose(self, logits: Scores, rows: list[ShardSequence]) -> Choices:
        """Choose the next token of every row.

        `logits` [R, >= vocab_size], any float dtype, for the last known token of each row; may be
        overwritten. A row whose scores leave nothing to choose from (NaN, +inf, everything
        masked) gets a fault; the others do not notice.
        """
        if not rows:
            return Choices.none(0)
        size = self._block_rows
        parts = torch.split(torch.as_tensor(logits), size)
        blocks = zip(parts, self._settings(rows, size), strict=True)
        return Choices.concatenate([self._choose_block(*block) for block in blocks])

    def _choose_block(self, logits: torch.Tensor, settings: SamplingSettings) -> Choices:
        scores = self._pad_vocabulary(logits)
        faults = self._process(scores, settings)
        size = self._vocab_size
        allowed = self._masks(settings, size, faults)
        if allowed is not None:
            processors.apply_masks(scores, settings.grammar, allowed, size)
        best = largest(scores)
        finite = torch.isfinite(best)
        if not bool(finite.all()):
            for row in torch.nonzero(~finite)[:, 0].tolist():
                faults.setdefault(row, why_not(float(best[row]), settings.rows[row]))
                scores[row, :size] = 0.0  # anything that can be chosen from
                best[row] = 0.0
        # Relative to the best: a tiny temperature then overflows to -inf at most, never to +inf.
        scores.sub_(best[:, None])
        if settings.temperature is not None:
            scores.div_(torch.from_numpy(settings.temperature).to(self._device))
        rows, floors = settings.floors
        if len(rows):  # min-p alone is a mask
            own = select(scores, rows)
            least = torch.from_numpy(floors).to(self._device, own.dtype)
            own.masked_fill_(own < least[:, None], -torch.inf)
            if own is not scores:
                scores[torch.from_numpy(rows).to(self._device)] = own
        gaps = self._gaps(settings, faults)
        return self._choose(scores, settings, gaps).choices(faults)

    def _pad_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 scores [R, W], W a multiple of the chunk, -inf beyond the vocabulary."""
        size = self._vocab_size
        scores = logits[:, :size].to(torch.float32)
        if size % CHUNK:
            return torch.nn.functional.pad(scores, (0, -size % CHUNK), value=-torch.inf)
        return scores.contiguous()

    def _choose(
        self, scores: torch.Tensor, settings: SamplingSettings, gaps: Gaps | None
    ) -> Choice:
        numbers, choice = uniforms(settings), Choice.of(len(settings.rows))
        if len(settings.open):
            self._choose_open(scores, settings, numbers, choice)
        if len(settings.cut):
            self._choose_cut(scores, settings, numbers, choice, gaps)
        return choice

    def _choose_open(
        self, scores: torch.Tensor, settings: SamplingSettings, numbers: Floats, choice: Choice
    ) -> None:
        """Choose for rows without truncation: the best token, or by the inverse of the CDF."""
        rows = settings.open
        own = select(scores, rows)
        probabilities = own.softmax(-1)
        mass = masses(probabilities)
        log_totals = np.log(mass[:, -1] / to_numpy(largest(probabilities)))
        sample = settings.sample[rows]
        token_ids = np.zeros(len(rows), np.int64)
        if not sample.all():
            token_ids = first_largest(own)
        if sample.any():
            token_ids = np.where(sample, draw(probabilities, mass, numbers[rows]), token_ids)
        at = torch.from_numpy(token_ids).to(self._device)[:, None]
        choice.token_ids[rows] = token_ids
        choice.logprobs[rows] = to_numpy(own.gather(1, at)[:, 0]) - log_totals
        listed = np.flatnonzero(settings.top_n[rows])
        if len(listed):
            width = max(MOST_TIES, int(settings.top_n.max()))
            best, ids = candidates(select(own, listed), width)
            logprobs = best - log_totals[listed][:, None]
            keep = np.isfinite(best)
            for i, row in enumerate(rows[listed].tolist()):
                choice.tops[row] = alternatives(
                    ids[i], logprobs[i], keep[i], int(settings.top_n[row])
                )

    def _choose_cut(
        self,
        scores: torch.Tensor,
        settings: SamplingSettings,
        numbers: Floats,
        choice: Choice,
        gaps: Gaps | None,
    ) -> None:
        """Choose for rows with a truncation, among their best candidates if those decide."""
        own = select(scores, settings.cut)
        totals, entropies = mass_and_entropy(own, settings.cuts)

        def find(places: Ints, width: int) -> tuple[Floats, Ints]:
            return candidates(select(own, places), width)

        todo = choose_among_best(find, totals, entropies, settings, numbers, choice, gaps)
        for i in todo.tolist():
            self._choose_wide(own[i, : self._vocab_size], i, settings, numbers, choice)

    def _choose_wide(
        self,
        row_scores: torch.Tensor,
        i: int,
        settings: SamplingSettings,
        numbers: Floats,
        choice: Choice,
    ) -> None:
        """Choose for one row, the i-th of those with a truncation, among all its tokens."""
        row = int(settings.cut[i])
        scores = row_scores.cpu().numpy()
        places = np.flatnonzero(truncate_row(scores, settings.cuts, i))
        kept = scores[places].astype(np.float64)
        mass = np.exp(kept).cumsum()
        logprobs = kept - np.log(mass[-1])
        if settings.sample[row]:
            target = min(numbers[row] * mass[-1], np.nextafter(mass[-1], 0.0))
            at = int(np.searchsorted(mass, target, side="right"))
        else:
            at = int(kept.argmax())
        choice.token_ids[row], choice.logprobs[row] = places[at], logprobs[at]
        count = int(settings.top_n[row])
        if count:
            order = np.lexsort((places, -kept))[: max(MOST_TIES, count)]
            everything = np.ones(len(order), np.bool_)
            choice.tops[row] = alternatives(places[order], logprobs[order], everything, count)


def permutation(seed: int, size: int, count: int) -> Ints:
    """Return what `logits_processors.Permutation` says."""
    generator = torch.Generator().manual_seed(seed)  # the CPU's: the same on any device
    ids: Ints = torch.randperm(size, generator=generator)[:count].numpy()
    return ids
