"""Servers that are drawn answer as those that are chosen: in company as alone.

`python -m tests.stress.company --drawn` draws more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.company.comparing import Hermit, meet
from tests.company.covering import pairs_of
from tests.company.mixing import PARTS, draw_mixtures
from tests.company.servers import Server, early_snapshots
from tests.support.threads import one_torch_thread

COMPANIES = 2  # of each server
SEED = 4
# What none of them refuses: heads and smaller models draft for families of their size alone.
SERVED = ("nobody", "n-grams", "medusa", "mlp", "smaller llama", "smaller gemma2")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    with early_snapshots(), one_torch_thread():
        yield
    os.sched_setaffinity(0, cores)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(8))
def test_an_answer_in_company_is_that_alone(number: int, tmp_path: Path) -> None:
    plain = (
        mixture
        for mixture in draw_mixtures(SEED)
        if mixture.parts["drafter"] in SERVED and mixture.parts["ranks"] == "one"
    )
    mixture = next(islice(plain, number, None))
    server = Server(mixture.kind(), tmp_path)
    assert server.exact
    hermit = Hermit(server)
    for company in islice(server.companies(SEED + number), COMPANIES):
        assert not (wrong := meet(server, hermit, company).wrong), (mixture.name, wrong)


def test_all_parts_meet_but_those_that_exclude_each_other() -> None:
    met = {pair for mixture in islice(draw_mixtures(1), 900) for pair in pairs_of(mixture.parts)}
    assert {level for pair in met for level in pair} == {
        (kind, level) for kind, levels in PARTS.items() for level in levels
    }
    assert (("drafter", "eagle"), ("kv", "e5m2")) in met
    assert (("drafter", "eagle"), ("ranks", "two stages")) not in met
