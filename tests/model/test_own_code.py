"""Which models bring code that is needed; it is asked without importing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import is_known
from tgi_trio.model.config import ModelConfig, read_config
from tgi_trio.model.families.registry import FAMILIES
from tgi_trio.model.own_code import check_own_code, own_code, runnable_code
from tgi_trio.model.specs.t5 import T5_FAMILIES

AUTO_MAP = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}


def write(folder: Path, *files: str, **config: Any) -> ModelConfig:
    write_json(folder, {"model_type": "unheard_of"} | config)
    for name in files:
        (folder / name).touch()
    return read_config(folder)


def check(config: ModelConfig, trusted: bool) -> list[str]:
    known, ours = is_known(config.model_type), config.model_type in FAMILIES
    return check_own_code(config, trusted, needed=not known, ours=ours)


def test_known_are_the_types_of_ours_and_those_that_transformers_knows() -> None:
    from transformers import CONFIG_MAPPING

    assert all(map(is_known, {*FAMILIES, *T5_FAMILIES, *CONFIG_MAPPING}))
    assert not is_known("unheard_of")


def test_a_type_that_nobody_knows_needs_the_flag(tmp_path: Path) -> None:
    config = write(tmp_path, "configuration_x.py", "modeling_x.py", auto_map=AUTO_MAP)
    with pytest.raises(ModelLoadError) as caught:
        check(config, trusted=False)
    assert "configuration_x.py, modeling_x.py" in str(caught.value)
    assert "--trust-remote-code" in str(caught.value)
    (warning,) = check(config, trusted=True)
    assert "with all rights of this server" in warning
    assert runnable_code(config) == own_code(config)


@pytest.mark.parametrize("model_type", ["llama", "baichuan", "zamba"])
def test_a_known_type_needs_no_code(tmp_path: Path, model_type: str) -> None:
    config = write(tmp_path, model_type=model_type, auto_map=AUTO_MAP)
    assert check(config, trusted=False) == []
    (warning,) = check(config, trusted=True)
    assert "changes nothing" in warning
    assert runnable_code(config) is None  # it is not there


def test_the_warning_is_of_code_that_is_run(tmp_path: Path) -> None:
    files = ("configuration_x.py", "modeling_x.py")
    (warning,) = check(write(tmp_path, *files, model_type="zamba", auto_map=AUTO_MAP), trusted=True)
    assert "is run in the shard" in warning
    (warning,) = check(write(tmp_path, *files, model_type="llama", auto_map=AUTO_MAP), trusted=True)
    assert "changes nothing for the model: type 'llama' is computed here" in warning


@pytest.mark.parametrize("changes", [{}, {"auto_map": {"AutoTokenizer": ["x.X", None]}}])
def test_a_model_without_code_is_told_that_the_flag_does_nothing(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = write(tmp_path, **changes)
    assert own_code(config) is None
    assert check(config, trusted=False) == []
    (warning,) = check(config, trusted=True)
    assert "changes nothing" in warning


def test_code_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = write(tmp_path, "modeling_x.py", auto_map=AUTO_MAP)
    with pytest.raises(ModelLoadError, match=r"lacks configuration_x\.py"):
        check(config, trusted=True)
    there = {name: f"some/where--{place}" for name, place in AUTO_MAP.items()}
    config = write(tmp_path, auto_map=there)
    with pytest.raises(ModelLoadError, match="takes its code from some/where"):
        check(config, trusted=True)
    with pytest.raises(ModelLoadError, match="some/where on the hub"):
        check(config, trusted=False)
