"""LOG_LEVEL in every form that operators of text-generation-inference write."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.log_levels import parse_log_levels

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
OFF = logging.CRITICAL + 10


@pytest.mark.parametrize(
    ("text", "ours", "root"),
    [
        ("", INFO, WARNING),
        ("info", INFO, WARNING),
        ("INFO", INFO, WARNING),
        (" Debug ", DEBUG, WARNING),
        ("trace", DEBUG, WARNING),
        ("warn", WARNING, WARNING),
        ("SUCCESS", INFO, WARNING),
        ("WARNING", WARNING, WARNING),
        ("error", ERROR, ERROR),
        ("off", OFF, OFF),
        ("4", DEBUG, WARNING),
        ("0", OFF, OFF),
        (",info,", INFO, WARNING),
        ("debug,warn", WARNING, WARNING),  # the last one counts
    ],
)
def test_levels(text: str, ours: int, root: int) -> None:
    found = parse_log_levels(text)
    assert found.levels == {"": root, "tgi_trio": ours}
    assert found.unheard == ()


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (
            "info,text_generation_router=debug",
            {"tgi_trio": INFO, "tgi_trio.router": DEBUG, "tgi_trio.access": DEBUG},
        ),
        (
            "text_generation_launcher=WARN",
            {"tgi_trio": INFO, "tgi_trio.launcher": WARNING, "tgi_trio.shard": WARNING},
        ),
        ("text_generation_router::infer::v3=error", {"tgi_trio.router": ERROR}),
        ("text_generation_router_v3=error", {"tgi_trio.router": ERROR}),
        ("warn,text_generation_server", {"tgi_trio": WARNING, "tgi_trio.shard": DEBUG}),
        ("tgi_trio.access=off", {"tgi_trio": INFO, "tgi_trio.access": OFF}),
        (
            "off,tgi_trio.router.shards.supervisor=info",
            {"": OFF, "tgi_trio.router.shards.supervisor": INFO},
        ),
        ("hypercorn.error=debug", {"hypercorn.error": DEBUG, "": WARNING}),
    ],
)
def test_filters_by_module(text: str, levels: dict[str, int]) -> None:
    found = parse_log_levels(text)
    assert levels.items() <= found.levels.items()
    assert found.unheard == ()


def test_what_nothing_answers_to_is_named() -> None:
    text = "info,hyper=debug,tower_http=off,tgi_trio.nowhere=debug,[span{id=1,x=2}]=debug"
    found = parse_log_levels(text)
    assert found.levels == parse_log_levels("info").levels
    assert found.unheard == tuple(
        "hyper=debug tower_http=off tgi_trio.nowhere=debug [span{id=1,x=2}]=debug".split()
    )


@pytest.mark.parametrize(
    "text",
    ["loud", "info,loud", "text_generation_router=loud", "info;debug", "a b", "json", "x=y=z"],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected off, error, warn, info, debug, trace, or a fil"):
        parse_log_levels(text)


@given(st.text(st.sampled_from("info=debug,:._[]{}tgi_trio \n5"), max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_log_levels(text)
    except ValueError as error:
        assert str(error).startswith("expected ")
    else:
        assert {"", "tgi_trio"} <= found.levels.keys()


def test_levels_are_set_and_what_is_not_named_follows() -> None:
    names = ("", "tgi_trio", "tgi_trio.router", "tgi_trio.access")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        parse_log_levels("warn,text_generation_router=debug").apply()
        assert logging.getLogger("tgi_trio.router.engine.engine").isEnabledFor(DEBUG)
        assert not logging.getLogger("tgi_trio.launcher").isEnabledFor(INFO)
        assert not logging.getLogger("hypercorn").isEnabledFor(INFO)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
