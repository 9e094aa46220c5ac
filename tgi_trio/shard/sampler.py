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
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard import logits_processors as processors
from tgi_trio.shard.philox import uniform
from tgi_trio.shard.rowwise import (
    CHUNK,
    candidates,
    draw,
    first_largest,
    largest,
    mass_and_entropy,
    select,
    to_numpy,
)
from tgi_trio.shard.step import RowResult, Sequence
from tgi_trio.shard.truncation import Cuts, Floats, Ints, truncate
from tgi_trio.shard.wide_truncation import truncate_row

# How many of a row's best tokens to look at before looking at all: the first decides almost always.
_WIDTHS = (64, 512)
_MOST_TIES = 64  # alternatives listed when more tie with the last one asked for
# Scores handled at a time. On a CPU, larger temporaries would be mapped and faulted in every step.
_BLOCK = {"cpu": 2**22, "other": 2**27}


class RowSampler(Protocol):
    """What a runner needs of a sampler; `Sampler` is the one that is served."""

    def choose(self, logits: torch.Tensor, rows: list[Sequence]) -> list[RowResult]: ...

    def prepare(self, sequence: Sequence) -> bool: ...

    def drop(self, sequence: Sequence) -> None: ...


@dataclass(frozen=True)
class _Settings:
    """What a list of rows asks for; kept while the list stays the same, as in most steps."""

    rows: list[Sequence]
    seeds: NDArray[np.uint64]  # [R]
    sample: NDArray[np.bool_]  # [R]
    top_n: Ints  # [R]
    temperature: NDArray[np.float32] | None  # [R, 1]; None: all are 1
    floors: tuple[Ints, Floats]  # rows with min-p alone, and its logarithm
    open: Ints  # rows without any other truncation
    cut: Ints  # rows with one
    cuts: Cuts  # theirs
    watermark: list[tuple[int, Sequence]]
    repetition: list[tuple[int, Sequence]]
    counted: list[tuple[int, Sequence]]
    biased: list[tuple[int, Sequence]]
    minimum: list[tuple[int, Sequence]]
    grammar: list[tuple[int, Sequence]]

    @classmethod
    def of(cls, rows: list[Sequence], vocab_size: int) -> _Settings:
        sampling = [row.sampling for row in rows]
        temperature = np.array([s.temperature for s in sampling], np.float32)
        every = Cuts.of(sampling, vocab_size)
        ordered = (every.top_k > 0) | (every.top_p < 1) | (every.typical_p < 1)
        cut, floored = np.flatnonzero(ordered), np.flatnonzero(~ordered & (every.min_p > 0))
        numbered = list(enumerate(rows))
        return cls(
            rows=list(rows),
            seeds=np.array([s.seed for s in sampling], np.uint64),
            sample=np.array([s.sample for s in sampling], np.bool_),
            top_n=np.array([s.top_n for s in sampling], np.int64),
            temperature=None if (temperature == 1).all() else temperature[:, None],
            floors=(floored, np.log(every.min_p[floored])),
            open=np.flatnonzero(~ordered),
            cut=cut,
            cuts=every[cut],
            watermark=[(i, r) for i, r in numbered if r.sampling.watermark],
            repetition=[(i, r) for i, r in numbered if r.sampling.repetition_penalty != 1],
            counted=[
                (i, r)
                for i, r in numbered
                if r.sampling.frequency_penalty or r.sampling.presence_penalty
            ],
            biased=[(i, r) for i, r in numbered if r.sampling.logit_bias],
            minimum=[
                (i, r) for i, r in numbered if r.min_remaining > 0 and not r.sampling.ignore_eos
            ],
            grammar=[(i, r) for i, r in numbered if r.sampling.grammar],
        )


@dataclass
class _Choice:
    """The outcome per row; filled in by the two ways."""

    token_ids: Ints  # [R]
    logprobs: Floats  # [R]
    tops: list[list[tuple[int, float]]]  # [R]


class Sampler:
    """Chooses next tokens. Keeps what it knows of a sequence in `sequence.state["sampler"]`."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        *,
        grammars: processors.Grammars | None = None,
        watermark_gamma: float = 0.5,
        watermark_delta: float = 2.0,
    ) -> None:
        """Without `grammars`, rows that have one fail."""
        self._vocab_size = vocab_size
        self._eos_ids = np.array(sorted(eos_ids), np.int64)
        self._device = device
        self._grammars = grammars
        self._watermark = (watermark_gamma, watermark_delta)
        elements = _BLOCK["cpu" if device.type == "cpu" else "other"]
        self._block_rows = max(1, elements // vocab_size)
        self._rows: list[Sequence] = []  # of the last call
        self._blocks: list[_Settings] = []  # what they ask for, `_block_rows` at a time

    def prepare(self, sequence: Sequence) -> bool:
        """Have what the sequence's choices need made ready; return whether it is."""
        if self._grammars is None or not sequence.sampling.grammar:
            return True
        return self._grammars.prepare(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        sequence.state.pop(processors.STATE, None)
        if self._grammars is not None:
            self._grammars.drop(sequence)
        self._rows, self._blocks = [], []

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, rows: list[Sequence]) -> list[RowResult]:
        """Choose the next token of every row: one RowResult with one token each, in order.

        `logits` [R, >= vocab_size], any float dtype, for the last known token of each row; may be
        overwritten. A row whose scores leave nothing to choose from (NaN, +inf, everything
        masked) gets a fault; the others do not notice.
        """
        if not rows:
            return []
        size = self._block_rows
        if self._rows != rows:
            self._rows = list(rows)
            starts = range(0, len(rows), size)
            self._blocks = [_Settings.of(rows[i : i + size], self._vocab_size) for i in starts]
        results: list[RowResult] = []
        for settings, part in zip(self._blocks, torch.split(logits, size), strict=True):
            results += self._choose_block(part, settings)
        return results

    def _choose_block(self, logits: torch.Tensor, settings: _Settings) -> list[RowResult]:
        scores = self._padded(logits)
        faults = self._process(scores, settings)
        best = largest(scores)
        finite = torch.isfinite(best)
        if not bool(finite.all()):
            for row in torch.nonzero(~finite)[:, 0].tolist():
                faults.setdefault(row, _why_not(float(best[row]), settings.rows[row]))
                scores[row, : self._vocab_size] = 0.0  # anything that can be chosen from
                best[row] = 0.0
        # Relative to the best: a tiny temperature then overflows to -inf at most, never to +inf.
        scores.sub_(best[:, None])
        if settings.temperature is not None:
            scores.div_(torch.from_numpy(settings.temperature).to(self._device))
        rows, floors = settings.floors
        if len(rows):  # min-p alone is a mask
            own = select(scores, rows)
            own.masked_fill_(own < torch.from_numpy(floors).to(own)[:, None], -torch.inf)
            if own is not scores:
                scores[torch.from_numpy(rows).to(self._device)] = own
        choice = self._choose(scores, settings)
        results = [
            RowResult((token,), (logprob,), (top,))
            for token, logprob, top in zip(
                choice.token_ids.tolist(), choice.logprobs.tolist(), choice.tops, strict=True
            )
        ]
        for row, fault in faults.items():
            results[row] = RowResult(fault=fault)
        return results

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 scores [R, W], W a multiple of the chunk, -inf beyond the vocabulary."""
        size = self._vocab_size
        scores = logits[:, :size].to(torch.float32)
        if size % CHUNK:
            return torch.nn.functional.pad(scores, (0, -size % CHUNK), value=-torch.inf)
        return scores.contiguous()

    def _process(self, scores: torch.Tensor, settings: _Settings) -> dict[int, str]:
        """Apply everything up to the grammar mask; return faults by row."""
        size = self._vocab_size
        faults: dict[int, str] = {}
        if settings.watermark:
            processors.watermark(scores, settings.watermark, *self._watermark, size)
        if settings.repetition:
            processors.repetition(scores, settings.repetition)
        if settings.counted:
            processors.frequency_and_presence(scores, settings.counted)
        if settings.biased:
            faults |= processors.logit_bias(scores, settings.biased, size)
        early = [row for row, sequence in settings.minimum if sequence.min_remaining > 0]
        if early:
            processors.forbid(scores, early, self._eos_ids)
        if settings.grammar:
            faults |= processors.grammar(scores, settings.grammar, self._grammars)
        return faults

    def _choose(self, scores: torch.Tensor, settings: _Settings) -> _Choice:
        count = len(settings.rows)
        positions = np.array([row.length for row in settings.rows], np.uint64)
        uniforms = uniform(settings.seeds, positions) if settings.sample.any() else np.zeros(count)
        choice = _Choice(np.zeros(count, np.int64), np.zeros(count), [[] for _ in range(count)])
        if len(settings.open):
            self._choose_open(scores, settings, uniforms, choice)
        if len(settings.cut):
            self._choose_cut(scores, settings, uniforms, choice)
        return choice

    def _choose_open(
        self, scores: torch.Tensor, settings: _Settings, uniforms: Floats, choice: _Choice
    ) -> None:
        """Choose for rows without truncation: the best token, or by the inverse of the CDF."""
        rows = settings.open
        own = select(scores, rows)
        probabilities = own.softmax(-1)
        log_totals = -np.log(to_numpy(largest(probabilities)))
        sample = settings.sample[rows]
        token_ids = np.zeros(len(rows), np.int64)
        if not sample.all():
            token_ids = first_largest(own)
        if sample.any():
            token_ids = np.where(sample, draw(probabilities, uniforms[rows]), token_ids)
        at = torch.from_numpy(token_ids).to(self._device)[:, None]
        choice.token_ids[rows] = token_ids
        choice.logprobs[rows] = to_numpy(own.gather(1, at)[:, 0]) - log_totals
        listed = np.flatnonzero(settings.top_n[rows])
        if len(listed):
            width = max(_MOST_TIES, int(settings.top_n.max()))
            best, ids = candidates(select(own, listed), width)
            logprobs = best - log_totals[listed][:, None]
            keep = np.isfinite(best)
            for i, row in enumerate(rows[listed].tolist()):
                choice.tops[row] = _alternatives(
                    ids[i], logprobs[i], keep[i], int(settings.top_n[row])
                )

    def _choose_cut(
        self, scores: torch.Tensor, settings: _Settings, uniforms: Floats, choice: _Choice
    ) -> None:
        """Choose for rows with a truncation, among their best candidates if those decide."""
        own = select(scores, settings.cut)
        totals, entropies = mass_and_entropy(own, settings.cuts)
        todo = np.arange(len(settings.cut))
        for width in _WIDTHS:
            if len(todo) == 0:
                return
            best, ids = candidates(select(own, todo), width)
            whole = width >= self._vocab_size
            kept = truncate(best, totals[todo], entropies[todo], settings.cuts[todo], whole=whole)
            rows = settings.cut[todo]
            places = np.where(settings.sample[rows], kept.draw(uniforms[rows]), kept.first())
            logprobs = best - np.log(kept.total)[:, None]
            for i in np.flatnonzero(kept.settled).tolist():
                row, place = int(rows[i]), int(places[i])
                choice.token_ids[row] = ids[i, place]
                choice.logprobs[row] = logprobs[i, place]
                if settings.top_n[row]:
                    choice.tops[row] = _alternatives(
                        ids[i], logprobs[i], kept.keep[i], int(settings.top_n[row])
                    )
            todo = todo[~kept.settled]
        for i in todo.tolist():
            self._choose_wide(own[i, : self._vocab_size], i, settings, uniforms, choice)

    def _choose_wide(
        self,
        row_scores: torch.Tensor,
        i: int,
        settings: _Settings,
        uniforms: Floats,
        choice: _Choice,
    ) -> None:
        """Choose for one row, the i-th of those with a truncation, among all its tokens."""
        row = int(settings.cut[i])
        scores = row_scores.cpu().numpy()
        places = np.flatnonzero(truncate_row(scores, settings.cuts, i))
        kept = scores[places].astype(np.float64)
        mass = np.exp(kept).cumsum()
        logprobs = kept - np.log(mass[-1])
        if settings.sample[row]:
            target = min(uniforms[row] * mass[-1], np.nextafter(mass[-1], 0.0))
            at = int(np.searchsorted(mass, target, side="right"))
        else:
            at = int(kept.argmax())
        choice.token_ids[row], choice.logprobs[row] = places[at], logprobs[at]
        count = int(settings.top_n[row])
        if count:
            order = np.lexsort((places, -kept))[: max(_MOST_TIES, count)]
            everything = np.ones(len(order), np.bool_)
            choice.tops[row] = _alternatives(places[order], logprobs[order], everything, count)


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the raw log-softmax of one given token per row: float32 [T] from [T, V] and [T]."""
    return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _why_not(best: float, sequence: Sequence) -> str:
    if best == -np.inf:
        return "no token can follow: grammar, min_new_tokens and logit_bias together forbid all"
    value = "NaN" if np.isnan(best) else "infinity"
    return f"the model's logits contain {value} at position {sequence.length - 1}"


def _alternatives(
    ids: Ints, logprobs: Floats, keep: NDArray[np.bool_], count: int
) -> list[tuple[int, float]]:
    """Return the `count` best kept tokens and all that tie with the last of them, best first."""
    places = np.flatnonzero(keep)
    if len(places) > count:
        places = places[logprobs[places] >= logprobs[places[count - 1]]]
    return list(zip(ids[places].tolist(), logprobs[places].tolist(), strict=True))
