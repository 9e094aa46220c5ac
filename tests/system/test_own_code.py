"""Models and tokenizers that bring their own Python code, through the whole server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.own_code import answer, use_tokenizer_code, write_wave_model
from tests.support.warm_children import home_of_hub
from tests.support.warm_start import run_warm
from tests.system.client import generate
from tests.system.golden import tokenize
from tests.system.server import serving
from tgi_trio.router.text.tokenizer_files import tokenizer_json


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a type that nobody knows; who runs its code is written down."""
    monkeypatch.setenv("WAVE_WITNESS", str(tmp_path / "witness"))
    monkeypatch.setenv("HF_HOME", home_of_hub(os.environ))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_wave_model(tmp_path / "wave")


def witnesses(folder: Path) -> set[int]:
    """Return the processes that have run the model's code."""
    file = folder.parent / "witness"
    return {int(line) for line in file.read_text().split()} if file.exists() else set()


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run a server that does not come up."""
    words = ("-m", "tgi_trio", "--hostname", "127.0.0.1", "--port", "0", *flags)
    return run_warm(*words, shards="real")


def test_the_code_runs_in_the_shard_alone(folder: Path) -> None:
    flags = ("--model-id", str(folder), "--dtype", "float32", "--trust-remote-code")
    with serving(*flags) as server:
        details = generate(server.url, "A wave", max_new_tokens=20, details=True)["details"]
        found = [token["id"] for token in details["tokens"]]
        assert found == answer(folder, tokenize(server, "A wave"), 20)
        assert len(set(found)) > 5
        assert witnesses(folder) == set(server.shards())
        output = server.output
    assert "--trust-remote-code: code that comes with" in output
    assert "is run in the shard, with all rights of this server" in output
    assert "running code that comes with the model: configuration_wave.py, modeling_wave.py" in (
        output
    )


def test_without_the_flag_nothing_is_run_nor_spawned(folder: Path) -> None:
    done = start("--model-id", str(folder))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Model type 'wave' is known neither here nor to transformers" in done.stderr
    assert "give --trust-remote-code: it then runs in the shard" in done.stderr
    assert "shard group" not in done.stdout + done.stderr
    assert not witnesses(folder)


def test_a_tokenizer_in_code_is_run_once_in_a_process_of_its_own(folder: Path) -> None:
    use_tokenizer_code(folder)
    flags = ("--model-id", str(folder), "--dtype", "float32", "--trust-remote-code")
    with serving(*flags) as server:
        body = generate(server.url, "A wave", max_new_tokens=5, details=True)
        found = [token["id"] for token in body["details"]["tokens"]]
        assert found == answer(folder, tokenize(server, "A wave"), 5)
        assert len(before := witnesses(folder) - set(server.shards())) == 1
        assert server.process.pid not in before
    seen = witnesses(folder)
    assert tokenizer_json(folder, None, True).is_file()  # as the next start asks for it
    assert witnesses(folder) == seen


def test_what_cannot_be_served_is_refused_before_its_code_runs(folder: Path) -> None:
    use_tokenizer_code(folder)
    flags = ("--num-shard", "2", "--pipeline-stages", "2")
    done = start("--model-id", str(folder), "--trust-remote-code", *flags)
    assert done.returncode == 1 and "not cut into stages here" in done.stderr
    assert not witnesses(folder)


def test_code_that_fails_is_shown(folder: Path) -> None:
    modeling = folder / "modeling_wave.py"
    modeling.write_text(modeling.read_text() + "\nraise OverflowError('the tide is out')\n")
    done = start("--model-id", str(folder), "--trust-remote-code")
    assert done.returncode == 1
    assert f"The code that comes with {folder} cannot load its model: OverflowError" in done.stderr
    assert "the tide is out" in done.stderr and "modeling_wave.py" in done.stdout + done.stderr
