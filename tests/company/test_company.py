"""What one request gets never depends on others: answers in company are those alone.

Any two things that a request can ask for meet in one request and of neighbours, in every way of
running a server: `companies.py` has the tables. `python -m tests.stress.company` goes on longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.company.comparing import Hermit, meet
from tests.company.kinds import KINDS
from tests.company.servers import Servers, early_snapshots
from tests.support.threads import one_torch_thread

COMPANIES = 5  # of each server
SEED = 11


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with early_snapshots(), one_torch_thread():
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    return Servers(tmp_path_factory.mktemp("servers"))


@pytest.mark.sampled(20, first=4)
@pytest.mark.parametrize("name", KINDS)
def test_an_answer_in_company_is_that_alone(servers: Servers, name: str) -> None:
    server = servers[name]
    hermit, seed = Hermit(server), SEED + list(KINDS).index(name)
    for i, company in enumerate(islice(server.companies(seed), COMPANIES)):
        assert not (wrong := meet(server, hermit, company).wrong), (i, company.around, wrong)


@pytest.mark.parametrize("name", ["llama, kernels, n-grams", "lfm2, kernels"])
def test_what_companies_are_for_happens_to_them(servers: Servers, name: str) -> None:
    """Sequences are preempted, begin behind cached prefixes, and are replayed."""
    server, counted = servers[name], Counter[str]()
    often = {"memory": frozenset({"little"}), "prefixes": frozenset({"cached"})}
    ways = often | {"crash": frozenset({"one"}), "again": frozenset({"twice"})}
    ways["patience"] = frozenset({"endless"})
    companies, hermit = server.companies(SEED, ways=ways), Hermit(server)
    for company in islice(companies, 5):
        met = meet(server, hermit, company)
        assert not met.wrong, company
        counted.update(met.counters)
    assert all(counted[what] for what in ("preempted", "prefix_hit_tokens", "replayed")), counted


def test_what_only_calls_meet_happens_to_them(servers: Servers) -> None:
    """Adapters are loaded in turn, clients leave, are too late, and say again what is forgotten."""
    server, counted = servers["llama, kernels, adapters, over HTTP"], Counter[str]()
    ways = {
        **{"adapters held": frozenset({"one"}), "responses kept": frozenset({"few"})},
        **{"leaves": frozenset({"some"}), "patience": frozenset({"little"})},
    }
    companies, hermit = server.companies(SEED, ways=ways), Hermit(server)
    for company in islice(companies, 8):
        met = meet(server, hermit, company)
        assert not met.wrong, company
        counted.update(met.counters)
    happened = ("bodies left", "timed out", "sent whole", "forgotten", "orders of adapters")
    assert all(counted[what] for what in happened), counted
