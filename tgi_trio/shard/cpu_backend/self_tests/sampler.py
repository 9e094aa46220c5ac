"""Self-test of the sampler's kernels: a few rows, compared with numpy at every start.

For the same reason as `self_tests/step.py`. It also compiles the kernels before the first request.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler, permutation
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.sampling.truncation import Cuts
from tgi_trio.shard.torch_backend.sampling.wide_truncation import truncate_row

_VOCABULARY = 3000
_TOLERANCE = 1e-4  # of log-probabilities
_SETTINGS = (
    SamplingParameters(),
    SamplingParameters(sample=True, seed=5),
    SamplingParameters(sample=True, seed=6, top_k=20),
    SamplingParameters(sample=True, seed=7, top_p=0.9),  # flat: its candidates do not decide
    SamplingParameters(sample=True, seed=8, typical_p=0.7, min_p=0.01),
)


def find_fault() -> str | None:
    """Return what is wrong with the sampler's kernels, or None; raises what the compiler raises."""
    draw = np.random.default_rng(1)
    logits = draw.standard_normal((len(_SETTINGS), _VOCABULARY)).astype(np.float32)
    ids = np.ones(4, np.int32)
    rows = [
        ShardSequence(i, ids, len(ids), 1, len(ids) - 1, [], 1, 0, sampling)
        for i, sampling in enumerate(_SETTINGS)
    ]
    results = CpuSampler(_VOCABULARY, [0]).choose(logits.copy(), rows).rows
    for i, result in enumerate(results):
        scores = logits[i] - logits[i].max()
        keep = truncate_row(scores, Cuts.of(_SETTINGS, _VOCABULARY), i)
        logprobs = np.where(keep, scores.astype(np.float64), -np.inf)
        logprobs -= np.log(np.exp(logprobs).sum())
        token, wanted = result.token_ids[0], int(logits[i].argmax())
        if abs(logprobs[token] - result.logprobs[0]) > _TOLERANCE:
            return f"token {token} of row {i} has the wrong log-probability"
        if _SETTINGS[i].sample:
            if _SETTINGS[i].top_k:  # drawn from few candidates, best first
                continue
            number = uniform(np.array([_SETTINGS[i].seed], np.uint64), np.array([4], np.uint64))
            wanted = int(np.searchsorted(np.exp(logprobs).cumsum(), number[0], side="right"))
        if token != wanted:
            return f"row {i} has token {token} instead of {wanted}"
    if sorted(permutation(1, 9, 9).tolist()) != list(range(9)):
        return "a permutation lacks numbers"
    return None
