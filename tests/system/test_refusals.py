"""A start that cannot work ends before a shard is spawned, and what cannot act is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import LLAMA, make_folder, write_json
from tests.support.warm_start import run_warm
from tests.system.client import generate, get
from tests.system.server import serving
from tgi_trio import devices
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

# Serves in this process; a shard that would be spawned, or torch in memory, shows.
START = """
import sys
from tgi_trio.__main__ import main
from tgi_trio import __main__ as program

def spawned(spec, settings):
    print("spawned", flush=True)
    sys.exit(9)

serve = program.serve
program._COMMANDS = {"serve": lambda invocation: serve(invocation, spawned)}
code = main(sys.argv[1:])
print("loaded:", *sorted(sys.modules.keys() & {"torch", "transformers", "llvmlite"}))
sys.exit(code)
"""


def start(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = ["--hostname", "127.0.0.1", "--port", "0", "--model-id", str(folder), *flags]
    return run_warm("-c", START, *argv)


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            (),
            "no matrix in the format awq, 4 bits",
        ),
        ({"model_type": "no_such_model"}, (), "'no_such_model' is not one of ours"),
        ({}, ("--num-shard", "3"), "2 attention heads cannot be split over 3 shards"),
        ({}, ("--quantize", "exl2"), "which holds plain numbers"),
        ({"model_type": "codegen"}, ("--quantize", "fp8"), "runs through transformers"),
        ({}, ("--cpu-backend", "kernels"), "The CPU kernels cannot serve this model: heads have 2"),
        (
            {"model_type": "codegen"},
            ("--num-shard", "2", "--pipeline-stages", "2"),
            "runs through transformers, whose models are not cut into stages here",
        ),
        (
            {"model_type": "bart", "is_encoder_decoder": True},
            ("--num-shard", "2"),
            "'bart' is an encoder-decoder that runs through transformers, which is not split",
        ),
        ({"model_type": "mlp_speculator"}, (), "does not say which model its heads draft for"),
        ({"model_type": "codegen"}, ("--rope-factor", "2"), "--rope-scaling and --rope-factor"),
        ({"rope_scaling": {"type": "spiral"}}, (), "Rotary scaling 'spiral' is not known"),
        ({"hidden_act": "mish"}, (), "Activation 'mish' is not known"),
    ],
)
def test_a_start_that_cannot_work_ends_before_a_shard_is_spawned(
    tmp_path: Path, changes: dict[str, Any], flags: tuple[str, ...], message: str
) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, LLAMA | changes)
    done = start(tmp_path, *flags)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["loaded:"]
    (said,) = done.stderr.splitlines()
    assert said.startswith("tgi-trio: ") and message in said


TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


@pytest.mark.parametrize(
    ("files", "flags", "message"),
    [
        ({"tokenizer.json": "{"}, (), "tokenizer.json cannot be loaded as a tokenizer: "),
        ({"tokenizer.json": "{}"}, (), "missing required field `model`"),
        ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, (), "missing required field `vocab`"),
        ({"tokenizer.json": '{"model": {"type": "T9", "vocab": {}}}'}, (), "'T9'"),
        ({}, ("--chat-template", "{% if %}"), "The chat template 'default' does not compile"),
        ({}, ("--chat-template", "/no/where"), "--chat-template /no/where cannot be read: No such"),
        ({"c.json": "{'a'"}, ("--tokenizer-config-path", "c.json"), "c.json cannot be read: it is"),
        ({"c.json": "[]"}, ("--tokenizer-config-path", "c.json"), "must hold a JSON object"),
        (
            {"c.json": '{"chat_template": [{"name": "default"}]}'},
            ("--tokenizer-config-path", "c.json"),
            "cannot be read as the configuration of a tokenizer: KeyError('template')",
        ),
        ({"special_tokens_map.json": "[]"}, (), "special_tokens_map.json must hold a JSON object"),
    ],
)
def test_a_damaged_file_ends_a_start_before_a_shard_is_spawned(
    tmp_path: Path, files: dict[str, str], flags: tuple[str, ...], message: str
) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, TOKENIZER, "tokenizer.json")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = start(tmp_path, *(str(tmp_path / each) if each in files else each for each in flags))
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["loaded:"]
    (said,) = done.stderr.splitlines()
    assert said.startswith("tgi-trio: ") and message in said


def test_a_tensor_of_another_shape_ends_a_start_before_a_shard_is_spawned(tmp_path: Path) -> None:
    make_folder(tmp_path, changes={"model.norm.weight": ("F32", (5,))})
    write_json(tmp_path, TOKENIZER, "tokenizer.json")
    done = start(tmp_path)
    assert done.returncode == 1 and done.stdout.splitlines() == ["loaded:"]
    assert "'model.norm.weight' in " in done.stderr
    assert "has shape [5], but config.json asks for [4]" in done.stderr


def test_a_start_that_can_work_spawns_a_shard(tmp_path: Path) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, TOKENIZER, "tokenizer.json")
    assert "spawned" in start(tmp_path, "--chat-template", "{{ messages }}").stdout


@pytest.mark.skipif(devices.has_driver(), reason="a device may be there")
@pytest.mark.parametrize(
    "flags", [("--cuda-graphs", "1,2"), ("--cuda-memory-fraction", "0.5")], ids=str
)
def test_flags_of_a_device_are_refused_where_no_driver_is(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    done = start(make_folder(tmp_path), *flags)
    assert done.returncode == 1 and done.stdout.splitlines() == ["loaded:"]
    assert f"{flags[0]} needs a CUDA device" in done.stderr


def test_flags_that_cannot_act_on_a_model_of_transformers_are_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "falcon", alibi=True)
    with serving("--model-id", str(tmp_path), "--speculate", "3") as server:
        shown = get(f"{server.url}/info").json()["settings"]
        body = generate(server.url, "some text", max_new_tokens=4, details=True)
        output = server.output
    assert (shown["speculate"], shown["prefix_caching"]) == (0, False)
    assert "path: transformers, cached" in shown["serving"]
    assert body["details"]["generated_tokens"] == 4
    assert "WARNING" in output
    assert "--speculate has no effect: this model is served by transformers, cached" in output
    assert "prefix caching has no effect: this model is served by transformers" in output
    assert "  speculate                      the model  0\n" in output
    assert "  prefix_caching                 the model  False\n" in output


def test_heads_that_nobody_reads_are_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"medusa_num_heads": 2}))
    with serving("--model-id", str(tmp_path)) as server:
        assert "config.json states 2 Medusa heads" in server.output


def test_scaled_positions_make_room_for_longer_sequences(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_position_embeddings=64)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path, settings | {"model_max_length": 64}, "tokenizer_config.json")
    flags = ("--rope-scaling", "dynamic", "--rope-factor", "2")
    with serving("--model-id", str(tmp_path), *flags) as server:
        info = get(f"{server.url}/info").json()
        body = generate(server.url, "some text", max_new_tokens=90, details=True)
    assert info["max_total_tokens"] == 128
    assert (info["settings"]["rope_scaling"], info["settings"]["rope_factor"]) == ("dynamic", 2.0)
    details = body["details"]
    assert details["generated_tokens"] == 90 or details["finish_reason"] == "eos_token"
