"""Memory does not grow with the square of a prompt, nor with prompt times vocabulary."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROMPT = 8192
VOCAB = 16384
CHUNK = 4096

# In a process of its own: the peak is the process's, and other tests leave memory behind.
PROGRAM = f"""
import sys
import torch
from pathlib import Path
from tests.shard.torch_backend.models_support import advance, sequence
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.machine.device_memory import peak_bytes, reset_peak
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

torch.set_num_threads(1)
folder = Path(sys.argv[1])
runner = load_torch_runner(ShardSettings(model_path=folder), read_config(folder))
runner.warm_up(WarmupRequest(64, {PROMPT} + 16, 1, {PROMPT} + 16))
prompt = [3 + i * i % ({VOCAB} - 3) for i in range({PROMPT})]
row = sequence(0, prompt, range(1, {PROMPT} // 16 + 2), new=1, prompt_logprobs=True)
device = torch.device("cpu")
# Whatever torch sets up at the first step comes before the count.
count = len(advance(runner, [row], [64])[0].prompt_logprobs)
before = reset_peak(device)
while row.remaining:
    found = advance(runner, [row], [min({CHUNK}, row.length - row.computed)])[0].prompt_logprobs
    count += len(found)
    last = found[-1]
print(count, last, peak_bytes(device) - before)
"""


def test_prompt_logprobs_of_a_long_prompt(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(
        "mistral",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2 * PROMPT,
        sliding_window=None,
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    count, last, peak = done.stdout.split()
    assert int(count) == PROMPT
    assert math.isfinite(float(last)) and float(last) < 0
    # Scores of one head would be 256 MiB, logits of all positions 512 MiB, those of a chunk 256.
    assert int(peak) < 192 << 20
