"""The processed distribution of one row, computed slowly and plainly in float64.

Written from the definitions, with sorting and loops, and sharing nothing with the sampler.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import RowResult, ShardSequence


def processed_logprobs(
    logits: NDArray[np.float32], row: ShardSequence, eos_id: int
) -> dict[int, float]:
    """Return {token id: log-probability} of what can be chosen."""
    s = row.sampling
    tokens = row.token_ids[: row.length].tolist()
    scores = dict(enumerate(logits.astype(float).tolist()))
    if s.watermark:
        generator = torch.Generator().manual_seed(15485863 * tokens[-1])
        for token in torch.randperm(len(scores), generator=generator).tolist()[: len(scores) // 2]:
            scores[token] += 2.0
    if s.repetition_penalty != 1:
        for token in set(tokens):
            old = scores[token]
            factor = s.repetition_penalty if old < 0 else 1 / s.repetition_penalty
            scores[token] = old * factor
    counted = Counter(tokens[row.prompt_length :] if s.absolute_penalties else tokens)
    unit = 1 if s.absolute_penalties else len(tokens)
    for token, count in counted.items():
        scores[token] -= s.frequency_penalty * count / unit + s.presence_penalty
    for token, bias in s.logit_bias:
        scores[token] += bias
    for token in barred(tokens, s.no_repeat_size, s.no_repeat_window) - set(s.no_repeat_spared):
        scores.pop(token, None)
    if row.min_remaining > 0 and not s.ignore_eos:
        del scores[eos_id]
    scores = {token: score / s.temperature for token, score in scores.items()}
    return normalised(min_p(typical(top_p(top_k(scores, s.top_k), s.top_p), s.typical_p), s.min_p))


def barred(tokens: list[int], size: int, window: int) -> set[int]:
    """Return what completes an n-gram that is whole in the last `window` tokens; 0: in all."""
    first = max(0, len(tokens) - window) if window else 0
    grams = [tokens[i : i + size] for i in range(first, len(tokens) - size + 1)] if size else []
    return {gram[-1] for gram in grams if gram[:-1] == tokens[len(tokens) - size + 1 :]}


def assert_logprobs(
    result: RowResult, logits: NDArray[np.float32], row: ShardSequence, eos: int
) -> None:
    """Whatever a result says of its tokens is what float64 says.

    Scores of a few tens have an error of 2e-6 when they are float32, and the sum over a vocabulary
    may add no more to it, however many tokens it has and however wide the registers are.
    """
    wanted = processed_logprobs(logits, row, eos)
    chosen, (tops,) = zip(result.token_ids, result.logprobs, strict=True), result.tops
    for token, logprob in [*chosen, *tops]:
        assert logprob == pytest.approx(wanted[token], abs=2e-6)


def normalised(scores: dict[int, float]) -> dict[int, float]:
    best = max(scores.values())
    total = best + math.log(math.fsum(math.exp(score - best) for score in scores.values()))
    return {token: score - total for token, score in scores.items()}


def top_k(scores: dict[int, float], k: int) -> dict[int, float]:
    if k == 0:
        return scores
    least = sorted(scores.values(), reverse=True)[min(k, len(scores)) - 1]
    return {token: score for token, score in scores.items() if score >= least}


def top_p(scores: dict[int, float], p: float) -> dict[int, float]:
    if p >= 1:
        return scores
    kept, mass = {}, 0.0
    for token, logprob in sorted(normalised(scores).items(), key=lambda item: -item[1]):
        if mass >= p:
            break
        kept[token] = scores[token]
        mass += math.exp(logprob)
    return kept


def typical(scores: dict[int, float], p: float) -> dict[int, float]:
    if p >= 1:
        return scores
    logprobs = normalised(scores)
    entropy = -math.fsum(math.exp(logprob) * logprob for logprob in logprobs.values())
    distance = {token: abs(-logprob - entropy) for token, logprob in logprobs.items()}
    mass, limit = 0.0, 0.0
    for token in sorted(distance, key=lambda token: distance[token]):
        limit = distance[token]
        mass += math.exp(logprobs[token])
        if mass >= p:
            break
    return {token: scores[token] for token in scores if distance[token] <= limit}


def min_p(scores: dict[int, float], p: float) -> dict[int, float]:
    if p == 0:
        return scores
    least = max(scores.values()) + math.log(p)
    return {token: score for token, score in scores.items() if score >= least}
