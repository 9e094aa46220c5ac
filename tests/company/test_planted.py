"""Companies find the faults that they are there to find."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.company.companies import Company
from tests.company.comparing import Hermit, meet
from tests.company.guests import Customs
from tests.company.house import Stuck
from tests.company.planted import PLANTED
from tests.company.servers import Server, Servers, early_snapshots
from tests.company.shrinking import shrink
from tests.support.threads import one_torch_thread
from tgi_trio.errors import TgiTrioError

SEED = 11
MOST = 30  # companies


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with early_snapshots(), one_torch_thread():
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    return Servers(tmp_path_factory.mktemp("servers"))


def is_wrong(server: Server, hermit: Hermit, company: Company, what: str) -> bool:
    """Return whether answers differ, or something is raised, with a fault planted."""
    hermit.answers(company.guests)  # without it
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[what].plant(patch)
        try:
            return bool(meet(server, hermit, company).wrong)
        except (ValueError, RuntimeError, AssertionError, TgiTrioError):  # its shard may end by it
            return True


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_found(servers: Servers, what: str) -> None:
    planted = PLANTED[what]
    server = servers[planted.server]
    hermit, companies = Hermit(server), server.companies(SEED, planted.wishes, planted.ways)
    assert any(is_wrong(server, hermit, each, what) for each in islice(companies, MOST))


def test_what_fails_is_made_small(servers: Servers) -> None:
    """Seeds by step need but one request that draws, and another before it in the same server."""
    what = "a seed by step"
    server = servers[PLANTED[what].server]
    hermit = Hermit(server)
    (company,) = islice(server.companies(SEED), 1)
    small = shrink(company, lambda one: is_wrong(server, hermit, one, what))
    (guest,) = small.guests
    assert small.customs == Customs()
    assert guest.request.sampling.sample and not guest.request.sampling.logit_bias
    assert len(guest.request.prompt_ids) == 1 and guest.request.stopping.max_new_tokens <= 2


def test_a_house_in_which_nobody_is_served_says_so(servers: Servers) -> None:
    server = servers["llama, kernels, n-grams"]
    (company,) = islice(server.companies(SEED), 1)
    waiting = Customs(paces=((0, 0, 0),))
    with pytest.raises(Stuck, match="no end in sight"):
        server.house(waiting, company.guests).serve()
