"""A CUDA device that is broken for good: its errors stick to a process, and the runner says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A process of its own: nothing can be computed in it afterwards.
BREAK = """
import sys
import numpy as np
from pathlib import Path
from tgi_trio.ipc.messages import PrefillRow
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.soundness import RunnerBroken, prove_sound
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

runner = load_torch_runner(ShardSettings(model_path=Path(sys.argv[1])), device="cuda")
memory = runner.warm_up(WarmupRequest(64, 64, 4, 256))
prove_sound(runner)
batch = Batch(vocab_size=runner.info.vocab_size, block_size=memory.block_size,
              blocks=memory.blocks, eos_ids=())
batch.add(PrefillRow(1, np.array([5, 6, 7], np.int32), 3, 0, [1], 4))
plan = batch.plan(64)
plan.kv_slots[:] = 2**40  # far outside of everything
try:
    runner.step(plan)
except Exception as error:
    print("step:", type(error).__name__)
try:
    prove_sound(runner)
except RunnerBroken as error:
    print("broken:", str(error).splitlines()[0])
"""


def test_a_sticky_error_is_found_by_the_runner_s_own_token(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    argv = [sys.executable, "-c", BREAK, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert "broken: the model cannot compute a single token any more" in done.stdout, done.stderr
