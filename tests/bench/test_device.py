"""What the device benchmark counts, and that all of it runs without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.device.models import SHAPES, config_of, make_runner
from bench.device.roofline import Ceiling, Size, Work

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_a_decode_moves_every_weight_once_and_what_is_cached() -> None:
    size, runner = Size.of(config_of("dry")), make_runner("dry", CPU, torch.float32, ())
    per_token = runner.info.kv_bytes_per_token
    alone = size.step(1, 1, 0, 4).moved
    norms = 4 * 2 * size.layers * size.hidden  # vectors do not count
    assert alone - per_token == runner.model.nbytes() - norms
    assert size.step(3, 1, 100, 4).moved - alone == pytest.approx((3 * 101 - 1) * per_token)


def test_a_prefill_multiplies_every_weight_by_every_token() -> None:
    size = Size.of(config_of("8B"))
    layers = size.layers * (size.attention + size.expert)
    seen = 4 * size.layers * size.query * sum(range(1, 101))  # causal
    assert size.step(1, 100, 100, 2).operations == pytest.approx(
        2 * (100 * layers + size.head) + seen
    )
    assert 7.5e9 < layers + size.head < 8e9


def test_a_mixture_moves_the_experts_that_are_used() -> None:
    size = Size.of(config_of("mixture"))
    assert size.expected_experts(1) == pytest.approx(8)
    assert 8 * 1.9 < size.expected_experts(2) < 16
    assert size.expected_experts(4096) == pytest.approx(128)
    assert size.step(1, 1, 0, 2).operations < size.step(1, 1, 0, 2).moved * 2


def test_the_slower_of_memory_and_matrices_sets_the_pace() -> None:
    ceiling = Ceiling(bytes_per_second=10.0, operations_per_second=100.0)
    assert ceiling.seconds(Work(moved=20, operations=100)) == 2.0
    assert ceiling.seconds(Work(moved=20, operations=500)) == 5.0


@pytest.mark.system
def test_the_kit_runs_without_a_device(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    env = os.environ | {"KIT_DRY": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    kit = ["bash", str(ROOT / "bench/device/kit.sh"), "env", "bench"]
    done = subprocess.run(kit, capture_output=True, text=True, timeout=1500, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "device.json").read_text())
    assert (found["schema"], found["bench"]) == (1, "device")
    assert "failed" not in found and "machine" in found
    told = {row["what"].split()[0] for row in found["results"]}
    assert told == {"warm-up", "decode", "prefill", "load", "server,"} and found["gb_per_s"] > 0
    assert any(row["what"].endswith(", 2 adapters") for row in found["results"])
    assert "dry" in SHAPES and len(list(tmp_path.glob("trace-dry-*.json.gz"))) == 2
