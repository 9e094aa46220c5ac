"""States in the kernels, in the batch that a shard runs: what transformers says.

Drafts that prove wrong, steps computed twice, snapshots, two threads; and kernels that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import FITTING, HYBRIDS, cpu_runner
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import (
    GreedyRecorder,
    generated,
    prompts,
    run,
    sequences,
)
from tests.shard.torch_backend.states.test_hybrid_models import (
    NEW,
    PROMPTS,
    Remembered,
    TextDrafter,
    check,
    row,
    serve,
)
from tests.shard.torch_backend.states.test_hybrid_models import run as run_batch
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.messages import StateGrant
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.references import TensorRef, Units
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import read_tensor
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.stored_matrix import Stack
from tgi_trio.shard.cpu_backend import kernel_groups, verified
from tgi_trio.shard.cpu_backend.cpu_runner import CpuRunner
from tgi_trio.shard.cpu_backend.instructions import find_variant
from tgi_trio.shard.cpu_backend.operations.writer import fill_panels
from tgi_trio.shard.cpu_backend.self_tests import states as state_self_test
from tgi_trio.shard.cpu_backend.self_tests.step import RandomWeights
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.variant import Variant

FAMILIES = (
    *("lfm2", "qwen3_5_text", "granitemoehybrid", "kimi_linear", "nemotron_h", "falcon_h1"),
    *("falcon_mamba", "jamba", "recurrent_gemma", "zamba2", "bailing_hybrid", "qwen4_exp_text"),
)
TEXTS = PROMPTS[::2]
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]
Model = tuple[CpuRunner, GreedyRecorder, Golden]


@pytest.fixture(scope="module", params=FAMILIES)
def model(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Model]:
    folder = checkpoint(request.param, **FITTING[request.param])
    with cpu_runner(folder, cores=(0, 1)) as (runner, recorder):
        yield runner, recorder, Remembered(folder)


@pytest.mark.sampled(3)
def test_drafts_and_steps_computed_twice(model: Model) -> None:
    runner, recorder, golden = model
    whole = {id: [*prompt, *golden.greedy(prompt, NEW)[0]] for id, prompt in enumerate(TEXTS)}
    batch = serve(runner, TextDrafter(whole))
    for id, prompt in enumerate(TEXTS):
        batch.add(row(id, prompt, StateGrant((1 + 2 * id, 2 + 2 * id))))
    texts = run_batch(batch, runner, seed=5)
    for id, prompt in enumerate(TEXTS):
        assert [*prompt, *texts[id]] == whole[id]
        check(golden, recorder, id, prompt)


@pytest.mark.sampled(3)
def test_a_sequence_goes_on_behind_a_snapshot(model: Model) -> None:
    runner, recorder, golden = model
    prompt = (PROMPTS[-1] * 4)[:90]
    batch = serve(runner)
    batch.add(row(20, prompt, StateGrant((1, 2), saves=((32, 3), (80, 4)))))
    first = run_batch(batch, runner, seed=1)
    batch.add(row(40, prompt, StateGrant((5, 6), source=3, held_length=80), cached=32))
    again = run_batch(batch, runner, seed=2)
    batch.add(row(60, [*prompt[:80], 9, 8, 7], StateGrant((7, 8), source=4), cached=80))
    run_batch(batch, runner, seed=3)
    assert first[20] == again[40]
    check(golden, recorder, 40, prompt)
    check(golden, recorder, 60, [*prompt[:80], 9, 8, 7])


@pytest.mark.sampled(3)
def test_a_row_gets_the_same_however_it_is_cut_and_whoever_is_beside(model: Model) -> None:
    runner, recorder, _ = model
    texts = prompts(9)[4:]

    def logits(chunk: int, joins: int) -> dict[int, tuple[list[int], np.ndarray]]:
        recorder.by_place.clear()
        batch = sequences(texts, new=8)
        run(runner, batch, chunk=chunk, joins=joins, seed=chunk)
        return {each.id: (generated(each), recorder.logits(each.id).numpy()) for each in batch}

    whole, cut = logits(10_000, joins=1), logits(7, joins=5)
    for id, (tokens, values) in whole.items():
        assert tokens == cut[id][0]
        np.testing.assert_allclose(values, cut[id][1], atol=2e-3)


def test_slots_take_what_the_books_say(checkpoint: Checkpoint) -> None:
    with cpu_runner(checkpoint("lfm2", **HYBRIDS["lfm2"])) as (runner, _):
        found = runner.warm_up(WarmupRequest(64, 256, 64, 1600))
        # Two layers keep two inputs of 128 channels each; one holds K and V.
        assert runner.info.state_bytes == 2 * 2 * 128 * 4
        assert found.state_slots == 1 + 2 * 64 + 32
        assert found.state_bytes == found.state_slots * runner.info.state_bytes
        assert runner.info.layers == 1
        # A shard that follows another has what that one found, whatever else would fit.
        again = runner.warm_up(WarmupRequest(64, 256, 64, 0, blocks=50, state_slots=20))
        assert (again.blocks, again.state_slots) == (50, 20)


@pytest.mark.parametrize("tokens", [2**32, 2**62])
def test_steps_that_no_memory_holds_are_refused_by_their_flags(
    checkpoint: Checkpoint, tokens: int
) -> None:
    with cpu_runner(checkpoint("lfm2", **HYBRIDS["lfm2"])) as (runner, _):
        for request in (WarmupRequest(tokens, 256, 64, 1600), WarmupRequest(64, 256, tokens, 1600)):
            with pytest.raises(ConfigurationError, match="lower --max-batch-prefill-tokens or --"):
                runner.warm_up(request)


def test_kernels_that_are_wrong_do_not_serve(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = decoder_spec(read_config(checkpoint("lfm2", **HYBRIDS["lfm2"])))
    assert spec is not None
    variant = find_variant(spec, "float32")
    assert verified.open_kernel_group(kernel_groups.STATES, variant)
    recur = state_self_test._recur

    def differ(variant: Variant, corrects: int) -> tuple[Floats, Floats]:
        found, expected = recur(variant, corrects)
        return found, expected + corrects

    monkeypatch.setattr(state_self_test, "_recur", differ)
    with pytest.raises(UnsupportedError, match=r"RECUR is .* away from the reference"):
        verified.open_kernel_group(kernel_groups.STATES, variant)


def test_outputs_that_fill_no_panels_lie_side_by_side() -> None:
    draw = np.random.default_rng(0)
    parts = [draw.standard_normal((rows, 32)).astype(np.float32) for rows in (32, 64, 4, 32, 4)]
    filled = fill_panels(Stack([PlainMatrix(part) for part in parts]))
    assert [part.shape[0] for part in filled.parts] == [32, 64, 40]
    found = np.concatenate([part.dequantised() for part in filled.parts])
    np.testing.assert_array_equal(found, np.concatenate(parts))
    whole = Stack([PlainMatrix(part) for part in (parts[0], parts[2])])
    assert fill_panels(whole) is whole


def test_a_tensor_is_read_in_part() -> None:
    ref = TensorRef("made-up", (1, 6, 2), Units("heads", (0, 4), 2), axis=1)
    whole = RandomWeights(False).array("made-up", (1, 6, 2))
    found = read_tensor(RandomWeights(False), ref, lambda units: slice(0, len(units.starts)))
    np.testing.assert_array_equal(found, whole[:, [0, 1, 4, 5]])
