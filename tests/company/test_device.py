"""Companies on a device, which a stand-in is: their answers are those that the host gives alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.company.comparing import Hermit, meet  # noqa: E402
from tests.company.kinds import DEVICES  # noqa: E402
from tests.company.servers import Server, early_snapshots  # noqa: E402
from tests.support.threads import one_torch_thread  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

COMPANIES = 2  # of each server
SEED = 21
# An interpreter takes long for long texts.
WISHES = {"length": frozenset({"one", "few", "many"}), "adapter": frozenset({"none"})}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with early_snapshots(), one_torch_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
        yield


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", DEVICES)
def test_an_answer_in_company_is_that_of_the_host_alone(name: str, tmp_path: Path) -> None:
    kind, seed = DEVICES[name], SEED + list(DEVICES).index(name)
    hermit = Hermit(Server(kind, tmp_path / "host"))
    server = Server(kind, tmp_path / "device", StandInDevice())
    for i, company in enumerate(islice(server.companies(seed, WISHES), COMPANIES)):
        assert not (wrong := meet(server, hermit, company).wrong), (i, company.around, wrong)
