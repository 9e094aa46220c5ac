"""The resolved settings as the table, JSON logs and GET /info show them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

from tgi_trio import demo
from tgi_trio.model.facts import ModelFacts
from tgi_trio.settings.records import Options, Settings
from tgi_trio.settings.resolve import resolve
from tgi_trio.settings.shown import as_json, as_rows, public_json


def resolved(options: Options) -> Settings:
    return resolve(options, ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048))


def test_the_api_key_is_never_shown() -> None:
    settings = resolved(Options(api_key=("hunter2", "swordfish")))
    shown = json.dumps(as_json(settings)) + repr(settings) + str(list(as_rows(settings)))
    assert "hunter2" not in shown and "swordfish" not in shown
    assert as_json(settings)["api_key"] == "(set)"
    in_a_file = resolved(Options(api_key_file=Path("/keys")))  # its keys are read when it is used
    assert as_json(in_a_file)["api_key"] == "(set)"


def test_rows_say_where_values_come_from() -> None:
    rows = {name: (value, origin) for name, value, origin in as_rows(
        resolved(Options(port=80, served_model_name=("a", "b")))
    )}  # fmt: skip
    assert rows["port"] == ("80", "asked")
    assert rows["hostname"] == ("0.0.0.0", "default")
    assert rows["max_total_tokens"] == ("2048", "computed")
    assert rows["served_model_names"] == ("a, b", "asked")
    assert rows["api_key"] == ("-", "default")


def test_what_a_checkpoint_decides_is_no_default() -> None:
    facts = ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048, quantize="gptq")
    settings = resolve(Options(speculate=2), facts)
    rows = {name: (value, origin) for name, value, origin in as_rows(settings)}
    assert rows["quantize"] == ("gptq", "computed")
    assert rows["drafter"] == ("ngram", "computed")
    assert rows["speculate"] == ("2", "asked")


def test_what_comes_with_the_model_was_not_asked_for() -> None:
    facts = ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048)
    given = Options(speculate=9)
    settings = resolve(replace(given, draft_model=demo.heads_path(), speculate=2), facts, given)
    rows = {name: (value, origin) for name, value, origin in as_rows(settings)}
    assert rows["draft_model"] == (str(demo.heads_path()), "computed")
    assert rows["speculate"] == ("2", "the model")
    assert rows["port"] == ("3000", "default")
    named = resolve(
        Options(draft_model=demo.heads_path()), facts, Options(draft_model=Path("org/heads"))
    )
    origins = {name: origin for name, _, origin in as_rows(named)}
    assert origins["draft_model"] == "asked", "by its name"


def test_clients_are_not_told_where_things_lie() -> None:
    settings = resolved(Options(huggingface_hub_cache=Path("/secret/cache"), port=81))
    assert "/secret/cache" in json.dumps(as_json(settings))
    public = public_json(settings)
    assert public["port"] == 81
    assert "/secret/cache" not in json.dumps(public) and "model_path" not in public


def test_no_setting_that_is_a_path_is_shown_to_clients() -> None:
    hints = get_type_hints(Settings)
    paths = {name for name, hint in hints.items() if Path in (hint, *get_args(hint))}
    assert "record_schedule" in paths
    assert not paths & public_json(resolved(Options())).keys()
