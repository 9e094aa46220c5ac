"""Flags and variables of text-generation-inference that do nothing here."""

from __future__ import annotations

from typing import Any

import pytest

from tgi_trio.cli.foreign import IDLE, REFUSED, Idle, RefusedFlag
from tgi_trio.cli.parser import UsageError, parse
from tgi_trio.settings.records import Options


def variable_of(row: RefusedFlag | Idle) -> str:
    return row.name.replace("-", "_").upper()


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_refused_flags_end_the_start_with_the_reason(refused: Any) -> None:
    for words in ([f"--{refused.name}=7"], [f"--{refused.name}=x"]):
        with pytest.raises(UsageError, match=f"--{refused.name} cannot be used: ") as caught:
            parse(words, {})
        assert refused.why in str(caught.value)
    if refused.env:
        with pytest.raises(UsageError, match=f"variable {variable_of(refused)} cannot be used"):
            parse([], {variable_of(refused): "7"})
    else:
        taken = parse([], {variable_of(refused): "7"})
        assert taken.options == Options()
        assert taken.notes == (f"{variable_of(refused)} makes no difference here: {refused.why}",)
        assert parse([], {variable_of(refused): " "}).notes == ()
    with pytest.raises(UsageError, match="cannot be used"):
        parse([f"--{refused.name}"], {})
    for value in refused.same:
        assert parse([f"--{refused.name}", str(value)], {}).options == Options()


@pytest.mark.parametrize("value", ["0", "false", "FALSE", "no", "off", " False "])
def test_truth_values_are_compared_not_texts(value: str) -> None:
    for name in ("disable-custom-kernels", "ngrok"):
        assert parse([f"--{name}={value}"], {}) == parse([], {})
        assert parse([], {name.replace("-", "_").upper(): value}) == parse([], {})


@pytest.mark.parametrize("value", ["1", "true", "yes", "maybe"])
def test_what_cannot_be_done_is_refused_in_every_spelling(value: str) -> None:
    with pytest.raises(UsageError, match=r"DISABLE_CUSTOM_KERNELS .*\(only false is accepted\)"):
        parse([], {"DISABLE_CUSTOM_KERNELS": value})


@pytest.mark.parametrize("idle", IDLE, ids=lambda idle: idle.name)
def test_what_makes_no_difference_is_said_once(idle: Idle) -> None:
    value = {"switch": "0", "usage-stats": "no-stack"}.get(idle.kind, "x")
    by_variable = parse([], {variable_of(idle): value})
    assert by_variable.options == Options()
    assert by_variable.notes == (f"{variable_of(idle)} makes no difference here: {idle.why}",)
    assert parse([], {variable_of(idle): " "}).notes == ()
    if idle.flag:
        by_flag = parse([f"--{idle.name}", value], {variable_of(idle): value})
        assert by_flag.notes == (f"--{idle.name} makes no difference here: {idle.why}",)
    else:
        with pytest.raises(UsageError, match="is not a flag"):
            parse([f"--{idle.name}", value], {})


@pytest.mark.parametrize("value", ["on", "off", "no-stack"])
def test_usage_stats_of_every_kind_do_not_end_a_start(value: str) -> None:
    assert "nothing is ever sent" in parse(["--usage-stats", value], {}).notes[0]


def test_nonsense_is_refused_there_as_well() -> None:
    with pytest.raises(UsageError, match="--usage-stats: expected on, off or no-stack, got 'x'"):
        parse(["--usage-stats", "x"], {})
    with pytest.raises(UsageError, match="MESSAGES_API_ENABLED: expected true or false"):
        parse([], {"MESSAGES_API_ENABLED": "ja"})


def test_a_flag_without_a_value_leaves_the_next_word_alone() -> None:
    invocation = parse(["--messages-api-enabled", "a/b"], {})
    assert invocation.options == parse(["serve", "a/b"], {}).options
