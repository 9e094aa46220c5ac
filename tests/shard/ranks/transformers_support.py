"""Models of transformers over several ranks: types that have a plan, and what they must say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from tests.shard.ranks.rank_processes import Ranks, ranks_of
from tests.shard.torch_backend.fallback_support import WAYS
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.check import is_known
from tgi_trio.shard.torch_backend.fallback import fallback_runner, proving
from tgi_trio.shard.torch_backend.fallback.fallback_runner import FallbackRunner

NEW = 5

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
PLAIN = "apertus1p5_text"  # a dense one
# Types with a plan that have no family of ours, and a variant that its family declines.
DIVIDED: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
    "beam": EXPERTS | {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 24},
    "codegen": {},
    "olmoe": {"clip_qkv": 1.0, "num_experts": 4, "num_experts_per_tok": 2},
}
# Of these, those that the installed transformers has, and runs with our attention.
HERE = [name for name in DIVIDED if is_known(name) and WAYS.get(name, "paged") == "paged"]


def build_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks, which are threads here, build models in turns: meanwhile torch is not itself."""
    lock = Lock()
    for module, name in ((fallback_runner, "load_model"), (proving, "build_twin")):
        build = getattr(module, name)

        def alone(*args: Any, build: Callable[..., Any] = build, **options: Any) -> Any:
            with lock:
                return build(*args, **options)

        monkeypatch.setattr(module, name, alone)


def models(ranks: Ranks) -> list[Any]:
    """Return what each rank has of a model."""
    runners = [runner for runner in ranks.runners if isinstance(runner, FallbackRunner)]
    assert len(runners) == len(ranks.runners)
    return [runner.way.model for runner in runners]


def check_ranks(
    folder: Path, size: int = 2, golden: Golden | None = None, **options: Any
) -> list[Any]:
    """Run rows in chunks among decodes over several ranks; they say what transformers says.

    Return each rank's model.
    """
    recorder = GreedyRecorder()
    rows = sequences(prompts(8)[5:], shuffle=3, new=NEW)
    with ranks_of(folder, size, recorder, **options) as ranks:
        assert ranks.info.backend == "transformers, paged"
        ranks.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        run(ranks, rows, chunk=20, joins=2)
        held = models(ranks)
    golden = golden or Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row, 2e-4)
    return held


def numbers(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def refused(folder: Path, message: str, size: int = 2) -> None:
    """Check that a model is refused by every rank."""
    with pytest.raises(ModelLoadError, match=message):
        with ranks_of(folder, size, GreedyRecorder()):
            pass


def change_plan(monkeypatch: pytest.MonkeyPatch, **styles: str) -> None:
    """Have PLAIN's plan say something else; the names' layers are left out, and dots are __."""
    from transformers import Apertus1p5TextConfig as Config

    assert Config.base_model_tp_plan is not None
    names = {"embed_tokens": "embed_tokens"}
    changed = {
        names.get(name, f"layers.*.{name.replace('__', '.')}"): style
        for name, style in styles.items()
    }
    plan = Config.base_model_tp_plan | changed
    monkeypatch.setattr(Config, "base_model_tp_plan", plan)
