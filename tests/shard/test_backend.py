"""Which backend serves, and what it needs for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tgi_trio import demo
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model import config
from tgi_trio.shard.backend import load_runner
from tgi_trio.whole_files import read_file

# As the shard's main program does it, without a router; the rows use every kind of choice.
SERVE = """
import sys
from pathlib import Path
import numpy as np
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.__main__ import load
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.speculation.ngram import NgramDrafter
from tgi_trio.ipc.startup import WarmupRequest

folder = Path(sys.argv[1])
settings = ShardSettings(
    model_path=folder, device="cpu", tokenizer_file=folder / "tokenizer.json"
)
runner = load(settings)
blocks = runner.warm_up(WarmupRequest(64, 64, 4, 256)).blocks
eos = runner.info.eos_ids
batch = Batch(
    vocab_size=runner.info.vocab_size,
    block_size=16,
    blocks=blocks,
    eos_ids=eos,
    drafter=NgramDrafter(2, eos),
    draft_budget=runner.info.draft_budget,
)
ids = np.array([5, 6, 7, 5, 6, 7, 5, 6], np.int32)
for i, sampling in enumerate([
    SamplingParameters(prompt_logprobs=True, top_n=3),
    SamplingParameters(sample=True, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5),
    SamplingParameters(sample=True, logit_bias=((9, 1.0),), typical_p=0.9, watermark=True),
    SamplingParameters(grammar='{"grammars": [{"lark_grammar": "start: /[a-z]+/"}]}'),
]):
    row = PrefillRow(i + 1, ids, len(ids), 0, [2 * i + 1, 2 * i + 2], 6, 2, sampling)
    sequence = batch.add(row)
    while not runner.prepare(sequence):
        pass
steps = 0
while (plan := batch.plan(64)) is not None:
    result = runner.step(plan)
    assert not any(row.fault for row in result.rows), result
    batch.settle(plan, result)
    steps += 1
print(runner.info.backend.split()[0], steps > 2, "torch" in sys.modules)
"""


def test_the_cpu_kernels_serve_without_torch() -> None:
    argv = [sys.executable, "-c", SERVE, str(demo.model_path())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kernels", "True", "False"]


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.usefixtures("one_thread")
def test_config_json_is_read_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def note(path: Path) -> bytes:
        read.append(path.name)
        return read_file(path)

    monkeypatch.setattr(config, "read_file", note)
    settings = ShardSettings(
        model_path=demo.model_path(), cpu_backend=backend, cpu_threads=1, max_lora_rank=8
    )
    load_runner(settings)
    assert read.count("config.json") == 1
