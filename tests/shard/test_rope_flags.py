"""Rotary scaling that was asked for: the tokens of transformers with the same in config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import generated, run, sequence
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.backend import load_runner

Make = Callable[..., Path]
PROMPT = list(range(20, 80))  # with what follows longer than the 64 that are trained for
NEW = 20
pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(folder: Path, backend: str, kind: str | None) -> list[int]:
    settings = ShardSettings(
        model_path=folder,
        dtype="float32",
        cpu_backend=backend,
        rope_scaling=kind,
        rope_factor=None if kind is None else 2.0,
        cpu_threads=1,
    )
    runner = load_runner(settings)
    runner.warm_up(WarmupRequest(64, 128, 4, 512))
    assert runner.info.max_positions == (64 if kind is None else 128)
    row = sequence(0, PROMPT, range(1, 9), new=NEW)
    run(runner, [row])
    return generated(row)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("torch", "linear"), ("torch", "dynamic"), ("kernels", "linear"), ("kernels", "dynamic")],
)
def test_tokens_are_those_of_the_same_scaling_in_the_file(
    checkpoint: Make, tmp_path: Path, backend: str, kind: str
) -> None:
    folder = checkpoint("llama", **FITTING["llama"], max_position_embeddings=64)
    edited = Path(shutil.copytree(folder, tmp_path / "edited"))
    config = json.loads((edited / "config.json").read_text())
    assert "rope_parameters" in config  # beside which the older name is put
    config["rope_scaling"] = {"rope_type": kind, "factor": 2.0}
    (edited / "config.json").write_text(json.dumps(config))
    expected = Golden(edited).greedy(PROMPT, NEW)[0]
    assert tokens(folder, backend, kind) == expected
    assert tokens(folder, backend, None) != expected


@pytest.mark.parametrize(
    ("family", "why"), [("gpt2", "no rotary"), ("codegen", "transformers"), ("t5", "no rotary")]
)
def test_models_without_rotary_positions_of_ours_refuse(
    checkpoint: Make, family: str, why: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"--rope-scaling.*{why}"):
        load_runner(ShardSettings(model_path=checkpoint(family), rope_factor=2.0))
