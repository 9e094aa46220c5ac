"""Looks for answers that depend on others: `python -m tests.stress.company --seconds 600`.

Random companies of requests meet servers of all kinds (`tests/company/kinds.py`), in one process
and without sockets; each answer has to be that of the request alone. A company that fails is made
as small as it can be and shown. At the end it says which pairs of features have met. With
`--drawn`, servers are made of parts that are drawn: family, numbers, drafter, threads, ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch comes in
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from tests.company.companies import Company
from tests.company.comparing import Hermit, meet
from tests.company.kinds import KINDS
from tests.company.mixing import draw_mixtures
from tests.company.servers import Server, Servers, early_snapshots
from tests.company.shrinking import shrink
from tests.support.threads import one_torch_thread
from tgi_trio.errors import TgiTrioError

_EACH_S = 12.0  # for a server that is drawn


def main() -> int:
    """Return how many companies have failed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all servers together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--servers", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="SERVER"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="servers made of drawn parts (tests/company/mixing.py)"
    )
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    failed = 0
    with ExitStack() as stack:
        stack.enter_context(one_torch_thread())
        stack.enter_context(early_snapshots())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if asked.drawn:
            return min(1, hunt_drawn(folder, asked.seed, asked.seconds))
        servers = Servers(folder)
        for name in asked.servers:
            share = asked.seconds / len(asked.servers)
            failed += hunt(name, servers[name], asked.seed, share)
    return min(1, failed)


def hunt(name: str, server: Server, seed: int, seconds: float) -> int:
    """Have companies meet a server for so long; return how many failed."""
    companies = server.companies(seed)
    hermit, end, met, failed = Hermit(server), time.monotonic() + seconds, 0, 0
    for company in companies:
        wrong = faults_of(server, hermit, company)
        companies.coverage.note(company.around, company.asked)
        met += 1
        if wrong:
            failed += 1
            show(name, shrink(company, lambda one: bool(faults_of(server, hermit, one))), server)
        if time.monotonic() > end:
            break
    print(f"{name}: {met} companies, {failed} failed", flush=True)
    print("\n".join(f"    {line}" for line in companies.coverage.lines()), flush=True)
    return failed


def hunt_drawn(folder: Path, seed: int, seconds: float) -> int:
    """Have companies meet servers as they are drawn for so long; return how many failed."""
    end, failed, cores = time.monotonic() + seconds, 0, os.sched_getaffinity(0)
    for number, mixture in enumerate(draw_mixtures(seed)):
        if time.monotonic() > end:
            break
        try:
            server = Server(mixture.kind(), folder / str(number))
            failed += hunt(mixture.name, server, seed + number, _EACH_S)
        except TgiTrioError as error:
            print(f"{mixture.name}: refused, {error}", flush=True)
        finally:
            os.sched_setaffinity(0, cores)  # to one of which a team of threads binds this one
    return failed


def faults_of(server: Server, hermit: Hermit, company: Company) -> list[str]:
    """Return what is wrong with a company's answers, or what was raised."""
    try:
        return meet(server, hermit, company).wrong
    except Exception:
        return [traceback.format_exc()]


def show(name: str, company: Company, server: Server) -> None:
    """Print a company that fails, and why."""
    print(f"{name}: {company.customs}")
    for guest in company.guests:
        print(f"    {guest}")
    print("\n".join(faults_of(server, Hermit(server), company)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
