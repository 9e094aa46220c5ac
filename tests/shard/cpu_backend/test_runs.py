"""GLM 5.3 in the CPU kernels: an index of runs, hidden states that are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shard.cpu_backend.chooser_checks import check_long_context, check_unwritten
from tests.shard.cpu_backend.kernel_support import GLM5, cpu_runner
from tests.shard.cpu_backend.test_at_any_load import check_invariance
from tests.shard.torch_backend.states.test_hybrid_models import (
    NEW,
    Remembered,
    TextDrafter,
    check,
    row,
    serve,
)
from tests.shard.torch_backend.states.test_hybrid_models import run as run_batch
from tgi_trio.ipc.messages import StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "two threads": {"cores": (0, 0), "dtype": "bfloat16"},
}


def make(folder: Path, **changes: Any) -> Path:
    return make_wrapped(folder / "model", "glm5_next", **GLM5 | changes)


@pytest.mark.sampled(2)  # two threads and rounded numbers are asked of the others, too
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    tmp_path: Path, numbers: str
) -> None:
    check_invariance(make(tmp_path), **NUMBERS[numbers])


@pytest.mark.parametrize(
    "changes",
    [
        {"index_kpool": 24, "index_topk": 240, "index_n_heads": 20, "hc_mult": 4},
        {"index_kpool": 5, "index_topk": 100, "hc_mult": 3, "hc_sinkhorn_iters": 1},
    ],
)
def test_a_long_context(tmp_path: Path, changes: dict[str, int]) -> None:
    # No text that comes again: of runs that are nearly as good either may be chosen.
    prompt = np.random.default_rng(7).integers(3, 500, 1500).tolist()
    check_long_context(make(tmp_path, max_position_embeddings=2048, **changes), prompt)


def test_what_nobody_has_written_is_not_read(tmp_path: Path) -> None:
    # A layer goes on with the other's choice. Latents are K and V; of the index a key and its
    # weights are kept.
    check_unwritten(make(tmp_path), indexes=1, numbers=2 * 2 * 32 + 2 * 32)


def test_drafts_and_snapshots(tmp_path: Path) -> None:
    """Of a text that does not come again: of runs as good as others either may be chosen."""
    folder, prompt = make(tmp_path), np.random.default_rng(9).integers(3, 500, 90).tolist()
    golden = Remembered(folder)
    whole = [*prompt, *golden.greedy(prompt, NEW)[0]]
    with cpu_runner(folder, cores=(0, 0)) as (runner, recorder):
        batch = serve(runner, TextDrafter({id: whole for id in (20, 40)}))
        batch.add(row(20, prompt, StateGrant((1, 2), saves=((32, 3), (80, 4)))))
        first = run_batch(batch, runner, seed=1)
        batch.add(row(40, prompt, StateGrant((5, 6), source=3, held_length=80), cached=32))
        again = run_batch(batch, runner, seed=2)
    assert first[20] == again[40] == whole[len(prompt) :]
    for id in (20, 40):
        check(golden, recorder, id, prompt)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    def refusal(**changes: Any) -> str | None:
        folder = make(tmp_path / str(len(changes)), **changes)
        return find_unsupported(decoder_spec(read_config(folder)), "float32")

    assert refusal() is None
    assert refusal(hc_mult=5) == ("a token has 5 hidden states, of which no more than 4 are mixed")
    assert refusal(index_head_dim=48, hc_mult=4) == (
        "an index has keys of 48 numbers, which is no multiple of 32"
    )
    # Keys of runs would be rounded once more, and other runs be chosen than torch chooses.
    settings = ShardSettings(model_path=make(tmp_path / "8"), kv_cache_dtype="fp8_e5m2")
    with pytest.raises(UnsupportedError, match="keys of runs of tokens"):
        load_cpu_runner(settings, read_config(settings.model_path))
