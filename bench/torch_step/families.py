"""One decode step of eight rows on the torch backend: each family over Llama of its size.

    python -m bench.torch_step.families --json bench/out/torch_step_families.json

Random float32 weights, hidden size 512, two to four layers; Llama has as many, and an MLP as wide
as what a token goes through. The two alternate step by step, so that both see the machine in the
same state; the ratio is the median of neighbouring steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.harness.stats import add_output_flags, reporting, table_of
from bench.torch_step.__main__ import Step, alternate, decode_plan
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.checkpoints import make_checkpoint

ROWS, CONTEXT = 8, 160
_SIZE: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
_DENSE = _SIZE | {"intermediate_size": 1024}
_MIXTURE = _DENSE | {"moe_intermediate_size": 512}
_LATENT = _MIXTURE | {
    **{"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    **{"v_head_dim": 64, "num_key_value_heads": 8},
}
_INDEXED = _LATENT | {"index_topk": 64, "index_n_heads": 8, "index_head_dim": 64}
_WHOLE = _DENSE | {"intermediate_size": 512}  # of experts
_SCAN: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64}  # Mamba-2
_DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
_SHARED = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}  # two and one
_ALONE = {"hidden_size": 512, "intermediate_size": 1024}  # without heads
# Family -> its configuration; its kind: that of its feed-forward layers, or that it keeps states.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(("apertus", "arcee", "ernie4_5", "exaone4", "glm4"), (_DENSE, "dense")),
    **dict.fromkeys(("hunyuan_v1_dense", "ministral3", "nemotron"), (_DENSE, "dense")),
    **dict.fromkeys(("seed_oss", "smollm3", "gemma3_text", "qwen3"), (_DENSE, "dense")),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "glm4_moe", "hy_v3"), (_MIXTURE, "mixture")),
    **dict.fromkeys(("qwen3_moe",), (_MIXTURE, "mixture")),
    **dict.fromkeys(("gpt_oss", "granitemoe", "minimax_m2", "mixtral"), (_WHOLE, "mixture")),
    **dict.fromkeys(("hunyuan_v1_moe",), (_WHOLE, "mixture")),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "mistral4"), (_LATENT, "mixture")),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), (_INDEXED, "mixture")),
    "llama4_text": (_WHOLE | {"intermediate_size_mlp": 1024}, "mixture"),
    **dict.fromkeys(("lfm2", "lfm3"), (_DENSE, "hybrid")),
    "lfm2_moe": (_MIXTURE, "hybrid"),
    "qwen3_5_text": (_DENSE | _DELTA, "hybrid"),
    "olmo_hybrid": (_DENSE | _DELTA | {"linear_num_key_heads": 8}, "hybrid"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), (_DENSE | _DELTA | _SHARED, "hybrid")),
    "kimi_linear": (_LATENT | {"linear_num_heads": 8, "linear_head_dim": 64}, "hybrid"),
    "bamba": (_DENSE | _SCAN, "hybrid"),
    "falcon_h1": (_DENSE | _SCAN | {"mamba_d_ssm": 1024}, "hybrid"),
    "granitemoehybrid": (_WHOLE | _SCAN | {"shared_intermediate_size": 512}, "hybrid"),
    "nemotron_h": (
        _DENSE
        | {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64}
        | {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512},
        "hybrid",
    ),
    "jamba": (_WHOLE, "hybrid"),
    "zamba2": (
        _ALONE
        | {"num_attention_heads": 8, "n_mamba_heads": 16, "mamba_headdim": 64, "mamba_d_state": 64},
        "hybrid",
    ),
    "recurrent_gemma": (_DENSE | {"lru_width": 512, "num_key_value_heads": 1}, "hybrid"),
    **dict.fromkeys(("mamba", "falcon_mamba"), (_ALONE, "state alone")),
    "mamba2": (_ALONE | {"num_heads": 16, "head_dim": 64, "state_size": 64}, "state alone"),
}


def prepare(folder: Path) -> tuple[Runner, StepPlan]:
    """Return the runner of a folder, and a step that decodes eight rows."""
    runner = load_torch_runner(
        ShardSettings(model_path=folder, dtype="float32"), read_config(folder)
    )
    blocks = ROWS * (CONTEXT // BLOCK_SIZE + 2)
    memory = runner.warm_up(WarmupRequest(64, 256, ROWS, blocks * BLOCK_SIZE))
    plan = decode_plan(ROWS, CONTEXT)
    if memory.state_slots:  # each row reads one of two slots and writes the other
        plan.state_reads = 2 + 2 * np.arange(ROWS, dtype=np.int64)
        plan.state_writes = plan.state_reads + 1
    return runner, plan


def step(runner: Runner, plan: StepPlan) -> list[int]:
    """Run the step; return the tokens."""
    return [row.token_ids[0] for row in runner.step(plan).rows]


def measure(family: str, spare: Path, count: int) -> dict[str, Any]:
    """Return the median of both steps, and of the ratio of neighbouring ones."""
    changes, kind = FAMILIES[family]
    folder = make_checkpoint(spare / family, family, **changes)
    spec = decoder_spec(read_config(folder))
    layers = 2 if spec is None else len(spec.layers)
    like = spare / f"llama-{layers}"
    if not like.exists():
        make_checkpoint(like, "llama", **_DENSE, num_hidden_layers=layers)
    runs = (("own", folder), ("ll", like))
    steps: dict[str, Step] = {name: partial(step, *prepare(path)) for name, path in runs}
    times = alternate(steps, count)
    ratio = median(own / other for own, other in zip(times["own"], times["ll"], strict=True))
    return {
        "family": family,
        "kind": kind,
        "layers": layers,
        "llama_ms": median(times["ll"]),
        "ours_ms": median(times["own"]),
        "ratio": ratio,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.torch_step.families", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--count", type=int, default=60, help="steps of each")
    add_output_flags(parser)
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def found() -> tuple[str, dict[str, Any]]:
        return table_of(rows), {"rows": rows}

    with (
        tempfile.TemporaryDirectory() as spare,
        reporting(options.json, "torch_step.families", found),
    ):
        for family in options.families:
            print(f"{family} ...", file=sys.stderr, flush=True)
            rows.append(measure(family, Path(spare), options.count))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
