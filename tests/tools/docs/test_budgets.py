"""The table of budgets names flags that exist, and every number the limits take from a flag."""

from __future__ import annotations

from dataclasses import fields

from tgi_trio.cli.flags import list_flags
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tools.docs.budgets import BUDGETS, Stage, draw_stages


def test_every_budget_is_a_flag_and_every_flag_of_the_limits_is_a_budget() -> None:
    known = {flag.name: flag.field for flag in list_flags()}
    named = [budget.flag for budget in BUDGETS]
    assert len(set(named)) == len(named)
    assert set(named) <= known.keys()
    limits = {field.name for field in fields(SchedulingLimits)}
    elsewhere = {"prefix-caching", "speculate"}  # no budgets
    assert {name for name, field in known.items() if field in limits} - elsewhere <= set(named)


def test_the_picture_has_every_stage_and_every_flag() -> None:
    picture = draw_stages()
    assert all(f'{stage.name}["' in picture for stage in Stage)
    assert all(f"{budget.flag}:" in picture for budget in BUDGETS)
