"""What a row's best candidates can decide, and what is known of that beforehand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.sampling.truncation import Cuts, could_settle, truncate

FEW, MANY, SIZE = 16, 128, 1000
CUTS = st.one_of(
    st.builds(SamplingParameters, top_k=st.integers(1, 200)),
    st.builds(SamplingParameters, top_p=st.floats(0.01, 0.99), typical_p=st.floats(0.01, 1.0)),
    st.builds(SamplingParameters, typical_p=st.floats(0.01, 0.99)),
)


@given(cut=CUTS, spread=st.sampled_from([0.0, 0.3, 1.0, 4.0]), seed=st.integers(0, 10**6))
def test_whatever_many_candidates_decide_was_foreseen_from_few(
    cut: SamplingParameters, spread: float, seed: int
) -> None:
    scores = np.sort(np.random.default_rng(seed).standard_normal((1, SIZE)) * spread)[:, ::-1]
    scores -= scores[:, :1]
    weights = np.exp(scores)
    totals = weights.sum(axis=1)
    entropies = np.log(totals) - (weights * scores).sum(axis=1) / totals
    cuts = Cuts.of([cut], SIZE)
    many = truncate(scores[:, :MANY], totals, entropies, cuts, whole=False)
    assert could_settle(scores[:, :FEW], totals, cuts, MANY)[0] or not many.settled[0]


def test_a_flat_row_is_known_to_be_beyond_many_candidates() -> None:
    scores, totals = np.zeros((2, FEW)), np.array([SIZE, SIZE], np.float64)
    cuts = Cuts.of([SamplingParameters(top_p=0.1), SamplingParameters(top_p=0.2)], SIZE)
    assert could_settle(scores, totals, cuts, MANY).tolist() == [True, False]
