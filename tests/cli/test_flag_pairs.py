"""Every flag of `serve`, and every two of them: accepted before a start, or refused by name.

What is asked here is everything that `serve` checks before a shard is there, but the network: with
one flag, an error names it; with two of which each is accepted alone, it names both.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from tests.cli.flag_samples import SAMPLES
from tgi_trio import demo
from tgi_trio.cli.device_count import choose_num_shard
from tgi_trio.cli.files import check_files
from tgi_trio.cli.flags import Flag, list_flags
from tgi_trio.cli.values import read_value
from tgi_trio.errors import TgiTrioError
from tgi_trio.model import check as model_check
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import ModelFacts, read_model_facts
from tgi_trio.settings.records import Options, Settings
from tgi_trio.settings.resolve import resolve
from tgi_trio.start.checks import check_start

NUMBERS = ("int", "tokens", "bytes", "us")
EXTREMES = {"share": ("0", "1"), "ratio": ("0", "1000000000000000000")}  # of those that are read
# Numbers of which other flags make something else than of a small and of a large one.
MORE = {"num-shard": ["2"], "pipeline-stages": ["2"], "max-batch-total-tokens": ["2"]}


class Given(NamedTuple):
    """A flag and its value."""

    flag: Flag
    value: Any

    def __str__(self) -> str:
        return f"--{self.flag.name} {self.value}"

    def named(self, error: str) -> bool:
        """Return whether an error says which flag it is about."""
        return f"`{self.flag.field}`" in error or f"--{self.flag.name}" in error


class Fields(Settings):
    """Settings that note which of them are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        type(self).read.add(name)
        return super().__getattribute__(name)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Sound values of flags that name files."""
    written = {
        "tokenizer-config-path": "{}",
        "api-key-file": "key",
        "cluster-secret-file": "s" * 32,
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    files = {
        "record-schedule": str(tmp_path / "record-schedule"),
        "draft-model": str(demo.heads_path()),
    }
    for name in ("prefix-cache-path", "adapter-folder", "huggingface-hub-cache"):
        (tmp_path / name).mkdir()
    return files | {path.name: str(path) for path in tmp_path.iterdir()}


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> ModelFacts:
    # What its weights are is the same beside all flags, and takes most of the time.
    monkeypatch.setattr(model_check, "check_checkpoint", lambda *given: None)
    return read_model_facts(demo.model_path())


def texts_of(flag: Flag, files: Mapping[str, str]) -> list[str]:
    """Return values of a flag that differ in what others may make of them."""
    if flag.kind in NUMBERS:
        return ["1", "100000", *MORE.get(flag.name, [])]
    if flag.kind in ("seconds", "number", "share", "ratio"):
        return ["0.25", "1"]
    if not flag.takes_value or flag.kind == "bool":
        return ["true", "false"]
    return [files.get(flag.name, SAMPLES[flag.kind][0])]


def list_given(files: Mapping[str, str]) -> Iterator[Given]:
    """Yield every flag with each of its values that is not its default."""
    for flag in list_flags():
        for text in texts_of(flag, files):
            value = read_value(flag.kind, f"--{flag.name}", text)
            value = (value,) if flag.many else value
            if value != flag.default:
                yield Given(flag, value)


def find_error(facts: ModelFacts, *given: Given, whole: bool = True) -> str:
    """Return why `serve` would not start with these flags; "": it would.

    `whole`: with what reads the model's files, of which nothing is asked otherwise.
    """
    try:
        options = Options(**{each.flag.field: each.value for each in given})
        options = choose_num_shard(options, {}, present=0)
        check_files(options)
        settings = resolve(options, facts)
        if whole:
            check_start(settings, read_config(settings.model_path, settings.rope))
    except TgiTrioError as error:
        return str(error)
    except Exception:
        return "a traceback: " + traceback.format_exc(limit=-2)
    return ""


def test_a_flag_alone_is_accepted_or_named(files: dict[str, str], facts: ModelFacts) -> None:
    every = list(list_given(files))
    every += [
        Given(flag, read_value(flag.kind, "", text))
        for flag in list_flags()
        if flag.kind in (*NUMBERS, "seconds", "number", "share", "ratio")
        for text in EXTREMES.get(flag.kind, ("0", "-1", "1000000000000000000"))
    ]
    unclear = [
        f"{one}: {error}"
        for one in every
        if (error := find_error(facts, one)) and not one.named(error)
    ]
    assert not unclear, "\n".join(unclear)


def test_two_flags_are_accepted_or_those_at_fault_named(
    files: dict[str, str], facts: ModelFacts
) -> None:
    every = list(list_given(files))
    alone = {str(one): find_error(facts, one) for one in every}
    asked = find_fields_read(facts, every)
    unclear = []
    for one, other in combinations(every, 2):
        if one.flag is other.flag:
            continue
        whole = one.flag.field in asked and other.flag.field in asked
        error = find_error(facts, one, other, whole=whole)
        blamed = [each for each in (one, other) if alone[str(each)]]
        named = [each for each in (one, other) if each.named(error)]
        if error and not (len(named) == 2 or any(each in named for each in blamed)):
            unclear.append(f"{one} {other}: {error}")
    assert not unclear, "\n".join(unclear)


def find_fields_read(facts: ModelFacts, every: list[Given]) -> set[str]:
    """Return the settings that `check_start` reads where one flag is given."""
    Fields.read = set()
    for one in every:
        if not find_error(facts, one, whole=False):
            settings = resolve(Options(**{one.flag.field: one.value}), facts)
            noted = Fields(**{each.name: getattr(settings, each.name) for each in fields(settings)})
            try:
                check_start(noted, read_config(noted.model_path, noted.rope))
            except TgiTrioError:
                continue  # what it has read counts
    return Fields.read
