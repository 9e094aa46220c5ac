"""Tables in which every pair meets, and what says so."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.company.asking import WISHES, write_request
from tests.company.calling import CALLED, write_call
from tests.company.companies import AROUND, ASKED, Companies
from tests.company.covering import Coverage, all_pairs, cover, pairs_of
from tests.company.gallery import Gallery

FACTORS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=4, unique=True),
    min_size=2,
)


@settings(max_examples=30)
@given(FACTORS, st.integers(0, 9))
def test_every_pair_meets_and_no_row_is_idle(factors: dict[str, list[str]], seed: int) -> None:
    left = all_pairs(factors)
    for row in cover(factors, seed):
        assert all(row[name] in levels for name, levels in factors.items())
        assert row.keys() == factors.keys()
        assert left & set(pairs_of(row))
        left.difference_update(pairs_of(row))
    assert not left


def test_wishes_are_covered_by_few_requests() -> None:
    """The least is the product of the two kinds with most wishes."""
    most, second = sorted(map(len, ASKED.values()))[-1:-3:-1]
    assert most * second <= len(cover(ASKED, 0)) <= 2 * most * second


def test_what_has_met_is_what_is_counted() -> None:
    asked, around = {"a": ["1", "2"], "b": ["1"]}, {"c": ["1", "2"], "d": ["1"]}
    coverage = Coverage(asked, around)
    coverage.note({"c": "2", "d": "1"}, [{"a": "1", "b": "1"}, {"a": "2", "b": "1"}])
    assert coverage.lines() == [
        "in one request: 2 of 2 pairs",
        "of two neighbours: 4 of 6 pairs, not a: 1 with a: 1; a: 2 with a: 2",
        "of a request and what is around: 6 of 9 pairs, not a: 1 with c: 1; a: 2 with c: 1; "
        "b: 1 with c: 1",
        "around: 1 of 2 pairs, not c: 1 with d: 1",
    ]


def test_companies_meet_every_pair_in_the_end() -> None:
    companies = Companies(3, {"adapter": frozenset({"none"})}, {"crash": frozenset({"one"})})
    for company in islice(companies, 120):
        assert {row["adapter"] for row in company.asked} == {"none"}
        assert company.customs.crashes
        companies.coverage.note(company.around, company.asked)
    left = companies.coverage.left
    assert not left["in one request"] and not left["around"]
    assert not left["of two neighbours"] and not left["of a request and what is around"]


def test_a_seed_always_draws_the_same_companies() -> None:
    first, again, other = (list(islice(Companies(seed), 3)) for seed in (5, 5, 6))
    assert [each.customs for each in first] == [each.customs for each in again]
    assert [each.asked for each in first] == [each.asked for each in again]
    for one, two in zip(first, again, strict=True):
        prompts = [
            [guest.request.prompt_ids.tolist() for guest in each.guests] for each in (one, two)
        ]
        assert prompts[0] == prompts[1]
    assert [each.asked for each in first] != [each.asked for each in other]


def test_every_wish_changes_what_is_asked_for() -> None:
    plain = {kind: next(iter(wishes)) for kind, wishes in WISHES.items()}
    gallery = Gallery("llava")
    base = write_request(plain, 1, gallery)
    for kind, wishes in WISHES.items():
        for name in list(wishes)[1:]:
            asked = write_request(plain | {kind: name}, 1, gallery)
            same = (asked.sampling, asked.stopping, asked.priority, asked.cache_salt)
            before = (base.sampling, base.stopping, base.priority, base.cache_salt)
            assert same != before or asked.prompt_ids.tolist() != base.prompt_ids.tolist()
    assert set(AROUND) & set(ASKED) == set()


@pytest.mark.parametrize("route", CALLED["route"])
def test_every_wish_of_a_route_changes_its_call(route: str) -> None:
    """Those that a route does not have change nothing."""
    plain = {kind: wishes[0] for kind, wishes in CALLED.items()} | {"route": route}
    of_chats = {"tools", "thought"}
    texts = {"truncate", "answers", "told"}
    lacking = {
        "generate": {"gap", "then", *of_chats},
        "completions": {"truncate", "format", "images", "then", *of_chats},
        "chat": {"truncate", "gap", "then"},
        "messages": {"gap", "then", *texts},
        "responses": {"truncate", "answers", "gap"},
        "infill": {"truncate", "answers", "format", "images", "then", *of_chats},
    }
    unlike = {("infill", "alone"), ("chat", "to several prompts"), ("generate", "several")}
    unlike |= {("messages", "tags"), ("responses", "tags")}
    gallery = Gallery("llava")
    for kind in CALLED.keys() - {"route"}:
        for name in CALLED[kind][1:]:
            call = write_call(plain | {kind: name}, 1, gallery)
            changed = call != write_call(plain, 1, gallery)
            assert changed == (kind not in lacking[route]) or (route, name) in unlike
