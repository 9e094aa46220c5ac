"""The text of models that see images as well, of families that are nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shard.cpu_backend.kernel_support import GLM5, cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import prompts, run, sequences
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("muse_glimmer", {"head_dim": 32}),
        ("step3p7", {"head_dim": 32, "share_expert_dim": 64}),
        ("muse_glimmer", {"head_dim": 32, "attention_bias": True, "layer_types": None}),
        ("glm5_next", GLM5),
        ("glm5_next", GLM5 | {"hc_mult": 4, "index_kpool": 3, "index_n_heads": 20}),
    ],
    ids=str,
)
def test_text_is_that_of_transformers(tmp_path: Path, family: str, text: dict[str, Any]) -> None:
    folder = make_wrapped(tmp_path, family, **text)
    with cpu_runner(folder) as (runner, recorder):
        rows = sequences(prompts(8)[4:], shuffle=3, new=8)
        run(runner, rows, chunk=20, joins=2)
        golden = Golden(folder)
        for row in rows:
            assert_greedy(golden, recorder, row, 2e-4)
