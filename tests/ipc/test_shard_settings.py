"""What a shard is told: every field is a flag's or has an origin, and arrives as it was given.

So a new flag of the shard is a field of `ShardOptions`, a row of `FLAGS`, and the code that acts.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tgi_trio
from tgi_trio.cli.flags import list_flags
from tgi_trio.demo import model_path
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import ModelFacts
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.settings import resolve as resolve_module
from tgi_trio.settings.records import MTP, NGRAM, Options, Settings, ShardOptions
from tgi_trio.settings.resolve import DRAFTED, resolve
from tgi_trio.start.rank_settings import find_rank_settings

PACKAGE = Path(tgi_trio.__file__).parent
OPTIONS = {each.name for each in fields(ShardOptions)}

# Of what is no option: who decides it, and from what.
ORIGINS = {
    "model_path": "the folder that --model-id was found in",
    "dtype": "--dtype, or the checkpoint's",
    "device": "what the machine has",
    "tokenizer_file": "the tokenizer's folder, unless --disable-grammar-support",
    "max_lora_rank": "--max-lora-rank, or what --lora-adapters need; 0 where there are none",
    "max_loaded_adapters": "--max-loaded-adapters, or as many as --lora-adapters names",
    "adapter_scope": "what --lora-adapters change, and --adapter-updates may",
    "rank": "the group, which counts its ranks",
    "world_size": "--num-shard or --sharded",
    "followers": "the group, which makes the channels",
    "image_arena": "the launcher, which makes it for models with images",
    "largest_image": "the launcher, by the limits of --max-image-pixels and --max-input-tokens",
    "longest_sound": "the launcher, by --max-audio-seconds and what the model hears",
    "rendezvous": "the group, which opens the file",
    "meeting": "the group, which listens where ranks of several machines meet",
    "frames": "the program that starts a rank on another machine",
    "local_rank": "the group, or that program",
    "local_size": "the group, or that program",
}

TEXTS = st.text(st.characters(codec="utf-8"))
PATHS = TEXTS.filter(lambda text: "\0" not in text).map(Path)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": st.integers(),
    "int | None": st.none() | st.integers(),
    "float": NUMBERS,
    "float | None": st.none() | NUMBERS,
    "str": TEXTS,
    "str | None": st.none() | TEXTS,
    "Path": PATHS,
    "Path | None": st.none() | PATHS,
    "tuple[str, ...]": st.lists(TEXTS).map(tuple),
    "tuple[int, ...] | None": st.none() | st.lists(st.integers()).map(tuple),
}


def anything(record: type[Any]) -> st.SearchStrategy[Any]:
    """Every field of a record by its type, so that a new one is drawn as well."""
    return st.builds(record, **{each.name: BY_TYPE[str(each.type)] for each in fields(record)})


def resolved(options: Options) -> Settings:
    return resolve(options, ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048))


def options_of(record: ShardOptions) -> dict[str, Any]:
    return {name: getattr(record, name) for name in OPTIONS}


def test_every_field_has_a_flag_or_an_origin() -> None:
    flags = {flag.field for flag in list_flags()}
    assert flags >= OPTIONS
    assert {each.name for each in fields(ShardSettings)} == OPTIONS | ORIGINS.keys()


def test_an_option_has_one_default() -> None:
    """That of `Options`, which --help shows, is the one that a shard has without being told."""
    assert options_of(Options()) == options_of(ShardSettings(model_path=Path()))


@given(anything(ShardSettings))
def test_a_command_line_is_read_as_it_was_written(told: ShardSettings) -> None:
    assert ShardSettings.parse(told.text()) == told


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"rank": 2, "world_size": 4}, (2, 4)),
        ({"rank": 5, "world_size": 6, "local_rank": 1, "local_size": 2}, (1, 2)),
    ],
)
def test_the_ranks_of_one_machine_divide_it(told: dict[str, Any], place: tuple[int, int]) -> None:
    assert ShardSettings(model_path=Path(), **told).place_on_machine == place


@pytest.mark.parametrize("text", ["", "3", "[1]", '{"model_path": "x", "colour": 1}', "{}"])
def test_what_is_no_command_line_of_ours_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Expected a JSON object with the keys quantize"):
        ShardSettings.parse(text)


@given(anything(ShardOptions))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_options_go_from_flags_to_shards_unchanged(
    monkeypatch: pytest.MonkeyPatch, options: ShardOptions
) -> None:
    """Whatever their values are: what cannot be asked for is another test's."""
    monkeypatch.setattr(resolve_module, "check", lambda options: None)
    asked = Options(**options_of(options))
    if asked.drafter == MTP:
        asked = replace(asked, drafter=NGRAM)  # the other is refused where nothing has such layers
    decided = resolved(asked)
    told = ShardSettings.parse(
        find_rank_settings(decided, read_config(model_path()), Path("t.json")).text()
    )
    expected = options_of(options) | {"drafter": decided.drafter}
    if options.speculate is None:  # it and the drafter are decided, by what there is to draft
        expected["speculate"] = 0 if options.draft_model is None else DRAFTED
    assert options_of(told) == expected
    assert (told.model_path, told.tokenizer_file) == (Path("/m"), Path("t.json"))


def test_every_rank_is_told_the_same_but_for_its_place() -> None:
    told: list[ShardSettings] = []

    def argv(spec: str, text: str) -> list[str]:
        told.append(ShardSettings.parse(text))
        return [sys.executable, "-c", ""]

    given = ShardSettings(model_path=Path("/m"), world_size=3, speculate=4, cuda_graphs=(1, 8))
    with ExitStack() as stack:
        request = WarmupRequest(64, 256, 4, 256)
        stack.enter_context(LocalGroup.spawn(argv, given, request, 1, 0))
    assert [each.rank for each in told] == [0, 1, 2]
    assert [len(each.followers) for each in told] == [2, 0, 0]
    for each in told:
        assert each.rendezvous >= 0
        assert replace(each, rank=0, followers=(), rendezvous=-1) == given


# The way from the flags to the code that acts: it passes options on without knowing them.
ON_THE_WAY = ("ipc", "router/shards", "settings/shown.py", "shard/process.py", "cli/parser.py")


def modules(*beginnings: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield every module whose path begins in one of these ways."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(beginnings):
            yield name, ast.parse(path.read_bytes())


def named_options(node: ast.AST) -> set[str]:
    """Return the options that a piece of code gets or gives by name."""
    attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    keywords = {each.arg for each in ast.walk(node) if isinstance(each, ast.keyword)}
    return {each for each in attributes | keywords if each in OPTIONS}


def test_the_way_to_the_shard_knows_no_option_by_name() -> None:
    found = {name: named for name, tree in modules(*ON_THE_WAY) if (named := named_options(tree))}
    assert not found


def copies(call: ast.Call) -> set[str]:
    """Return the options that a call takes out of one record to put them into another."""
    return {
        each.arg
        for each in call.keywords
        if each.arg in OPTIONS and isinstance(each.value, ast.Attribute)
        if each.value.attr == each.arg
    }


def test_nobody_copies_options_field_by_field() -> None:
    calls = (
        (f"{name}:{node.lineno}", copies(node))
        for name, tree in modules("")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    )
    assert not {place: names for place, names in calls if len(names) > 1}


def test_the_search_sees_copies() -> None:
    call = ast.parse("f(quantize=a.quantize, speculate=a.speculate, dtype=a.dtype)").body[0]
    assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
    assert copies(call.value) == {"quantize", "speculate"} == named_options(call)
