"""How much memory loading takes while weights are rounded: the file's pages, the result, a layer.

Pages of a file are the kernel's to take back, and are counted here as long as it has not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no high-water mark"
)
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 4096}
LAYERS = 5
# Of the file, in bfloat16: what is made of it, with scales and with embeddings as they were.
MADE = {"q8_0": 0.65, "int4": 0.45}
SLACK = 12 << 20  # buffers of a step, of Python and of torch's allocator

# A small model first: what is imported, compiled and tested then is no part of the second's.
LOAD = """
import gc, sys
from pathlib import Path
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.__main__ import load
small, large, backend, word = sys.argv[1:]

def loaded(folder):
    return load(ShardSettings(
        model_path=Path(folder), dtype="bfloat16", device="cpu", cpu_backend=backend, quantize=word
    ))

def mark(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

loaded(small)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is held now
before = mark("VmRSS")
runner = loaded(large)
print("peak", mark("VmHWM") - before, "kept", mark("VmRSS") - before)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("word", MADE)
def test_rounding_takes_no_more_than_file_result_and_a_layer(
    checkpoint: Callable[..., Path], backend: str, word: str
) -> None:
    small = checkpoint("llama", dtype="bfloat16", hidden_size=256, intermediate_size=512)
    large = checkpoint("llama", dtype="bfloat16", num_hidden_layers=LAYERS, **SIZES)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large), backend, word],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    peak, kept = int(words[-3]), int(words[-1])
    file = (large / "model.safetensors").stat().st_size
    layer = file // LAYERS
    assert peak <= kept + layer + SLACK, (peak, kept, layer)
    assert kept <= file * (1 + MADE[word]) + SLACK, (kept, file)
