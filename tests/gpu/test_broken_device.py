"""A CUDA device that is broken for good: its errors stick to a process, and the shard says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.shard.loop.scripted_router import channel, row
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.spawn import spawn_shard
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A process of its own: nothing can be computed in it afterwards.
BREAK = """
import sys
from pathlib import Path
import numpy as np
import torch
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard import process
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

WAY = sys.argv[3]
steps = 0

def load():
    folder = Path(sys.argv[2])
    runner = load_torch_runner(
        ShardSettings(model_path=folder), read_config(folder), device="cuda"
    )
    launch = runner.launch

    def break_later(plan):
        global steps
        steps += 1
        if steps == 6 and WAY == "in a step":
            plan.kv_slots = plan.kv_slots * 0 + 2**40  # far outside of everything
        pending = launch(plan)
        if steps == 6 and WAY == "behind a step":
            far = torch.full((1,), 1 << 30, device="cuda")
            torch.zeros(1, device="cuda").index_select(0, far)
        return pending

    runner.launch = break_later
    return runner

process.serve(sys.argv[1], load, ShardOptions())
"""


@pytest.mark.parametrize("way", ["in a step", "behind a step"])
def test_a_sticky_error_is_the_shard_s_last_word(tmp_path: Path, way: str) -> None:
    """The process ends by itself: what torch takes apart of a lost device ends it by SIGABRT."""
    make_checkpoint(tmp_path, "llama")
    with channel() as (endpoints, router):
        argv = [sys.executable, "-c", BREAK, endpoints.spec.text(), str(tmp_path), way]
        with spawn_shard(argv, endpoints, stderr=subprocess.PIPE) as child:
            router.greet()
            router.warm_up(max_prefill_tokens=64, blocks=256)
            assert router.receive().kind is FrameKind.WARMUP_REPLY
            router.end.release()
            blocks = (range(1, 5), range(5, 9))
            router.prefill(*(row(i, [5, 6, 7], 40, blocks=own) for i, own in enumerate(blocks)))
            assert child.process.stderr is not None
            errors = child.process.stderr.read().decode()
            code = child.process.wait(timeout=120)
    last = errors.strip().splitlines()[-1]
    assert last.startswith("shard 0 cannot go on: ") and "CUDA error" in last, errors
    assert code == 1, errors
