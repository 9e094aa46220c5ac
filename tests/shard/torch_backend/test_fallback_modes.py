"""Ways through transformers are chosen where nothing can hide: on a float32 twin, by long rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.torch_backend.fallback_support import WAYS
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import generated, load, plan, prompts, run, sequences
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.torch_backend.fallback import fallback_runner, modes
from tgi_trio.shard.torch_backend.fallback import probe as probe_module
from tgi_trio.shard.torch_backend.fallback import twin as twin_module
from tgi_trio.shard.torch_backend.fallback.modes import CachedWay, RecomputeWay
from tgi_trio.shard.torch_backend.fallback.probe import (
    EXACT,
    LONG,
    OWN_FORMS,
    choose_way,
    compute_plain,
    deviation,
    probe,
)
from tgi_trio.shard.torch_backend.fallback.twin import REACH, build_twin

PROMPTS = prompts(8)[2:]
NEW = 16
CAUSAL = sorted(family for family, way in WAYS.items() if way != "encoder-decoder")
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def test_a_cache_that_transformers_itself_cannot_use(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Blenderbot's decoder, with fewer layers in its encoder: the cache has too few."""
    model = transformers_model(checkpoint("ctrl"))
    forward = type(model).forward

    @functools.wraps(forward)
    def fail_with_a_cache(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("use_cache"):
            raise IndexError("list index out of range")
        return forward(self, *args, **options)

    assert CachedWay.try_make(model) is not None
    monkeypatch.setattr(type(model), "forward", fail_with_a_cache)
    assert CachedWay.try_make(model) is None


@pytest.mark.parametrize("family", CAUSAL)
def test_bfloat16_is_as_far_from_float32_as_rounding_takes_it(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    """Measured by a plain forward pass in bfloat16 over the same tokens; the oracle is float32."""
    folder = checkpoint(family, dtype="bfloat16")
    runner, recorder = load(folder, dtype="bfloat16")
    assert runner.info.backend == f"transformers, {WAYS[family]}"
    rows = sequences(PROMPTS, shuffle=3, new=NEW)
    run(runner, rows, chunk=20, joins=2)
    golden, rounded = Golden(folder), Golden(folder)
    rounded.model.to(torch.bfloat16)
    ours, plain = [], []
    for row in rows:
        exact = golden.logits(PROMPTS[row.id], generated(row))
        ours.append((recorder.logits(row.id) - exact).abs().flatten())
        plain.append((rounded.logits(PROMPTS[row.id], generated(row)) - exact).abs().flatten())
    # Of wrong positions half the logits are far off; of a token that another expert takes, few.
    middle = [float(torch.cat(errors).median()) for errors in (ours, plain)]
    assert middle[0] <= 1.5 * middle[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bamba_is_told_the_positions_of_its_tokens(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    """It counts from 0 in every call that does not say, cache or no cache."""
    way = choose_way(transformers_model(checkpoint("bamba"), dtype))
    assert isinstance(way, CachedWay)
    assert (way.positions, way.single_steps) == (True, False)
    twin = build_twin(way.model)
    expected = compute_plain(twin, LONG)
    for positions in (True, False):
        small = CachedWay.try_make(twin, positions=positions)
        assert small is not None
        far = deviation(probe(small, LONG), expected)
        assert far < EXACT if positions else far > 3 * OWN_FORMS


def test_a_way_that_forgets_windows_is_found_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 4096 tokens are longer than any probe: the twin's are shorter."""
    model = transformers_model(checkpoint("exaone4", sliding_window=4096))
    assert choose_way(model).name == "paged"
    model = transformers_model(checkpoint("exaone4", sliding_window=4096))
    discover = modes._discover_layers

    def without_windows(model: Any) -> Any:
        layers = discover(model)
        return layers and {index: replace(layer, window=0) for index, layer in layers.items()}

    monkeypatch.setattr(modes, "_discover_layers", without_windows)
    assert choose_way(model).name == "cached"


def test_a_cache_that_forgets_a_state_is_found_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CachedWay._logits

    def forgetful(self: CachedWay, plan: Any, index: int, offsets: Any) -> torch.Tensor:
        logits = original(self, plan, index, offsets)
        if plan.rows[index].computed > REACH:
            cache = plan.rows[index].state["transformers"][1]
            for layer in cache.layers:
                for state in getattr(layer, "recurrent_states", {}).values():
                    state.mul_(0.9)
        return logits

    model = transformers_model(checkpoint("bamba"))
    with monkeypatch.context() as patch:
        patch.setattr(CachedWay, "_logits", forgetful)
        assert choose_way(model).name == "recompute"
    assert choose_way(model).name == "cached"


def test_without_a_twin_the_slow_way_is_taken_and_said(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_module, "build_twin", lambda model: None)
    runner, _ = load(checkpoint("codegen"))
    assert isinstance(runner, fallback_runner.FallbackRunner)
    assert runner.info.backend == "transformers, recompute"
    assert "no small copy of CodeGenForCausalLM" in capfd.readouterr().err


def test_one_pass_over_a_row_says_what_passes_over_its_beginnings_say(
    checkpoint: Checkpoint,
) -> None:
    model = transformers_model(checkpoint("glm4"))
    with torch.inference_mode():
        step_by_step = probe(RecomputeWay(model), LONG)
        assert deviation(compute_plain(model, LONG), step_by_step) < EXACT


def test_probes_go_beyond_what_a_twin_spans() -> None:
    for row in (0, 1):
        assert sum(counts[row] for counts in LONG) > 3 * REACH
        assert max(counts[row] for counts in LONG) > REACH
        assert [counts[row] for counts in LONG][-2:] == [1, 1]


# --- twins ---------------------------------------------------------------------------------------

# Types of every kind, at the sizes that transformers' defaults have: 7 to 400 billion parameters.
LARGE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "exaone4": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "llama4_text": {},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "zamba2": {},
    "nemotron_h": {},
    "recurrent_gemma": {},
    "qwen3_5": {},  # with an image encoder
}


@pytest.fixture(params=sorted(LARGE))
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of real size without memory, as if it were on a CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(request.param, **LARGE[request.param])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    return model


@pytest.mark.sampled(5)
def test_a_twin_is_small_and_has_every_kind_of_layer(large: Any) -> None:
    before = torch.get_rng_state()
    twin: Any = build_twin(large)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(twin) is type(large) and not twin.training
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    assert sum(p.numel() for p in twin.parameters()) < 150e6
    assert twin_module._kinds(twin)[0] == twin_module._kinds(large)[0]
    assert twin.config._attn_implementation == large.config._attn_implementation
    text = twin.config.get_text_config(decoder=True)
    spans = ("sliding_window", "attention_chunk_size", "mamba_chunk_size", "attention_window_size")
    assert all((getattr(text, name, 0) or 0) <= REACH for name in spans)
    again: Any = build_twin(large)
    for first, second in zip(twin.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_twin_notices_where_a_token_stands(checkpoint: Checkpoint) -> None:
    """As initialised for training, scores are even, and a wrong position changes hardly a thing."""
    for family in ("bamba", "glm4", "llama4_text"):
        twin: Any = build_twin(transformers_model(checkpoint(family)))
        ids = torch.arange(20, 40)[None]
        with torch.inference_mode():
            right = twin(input_ids=ids).logits
            wrong = twin(input_ids=ids, position_ids=torch.zeros_like(ids)).logits
        assert (right - wrong).abs().max() > 0.05 * right.abs().max()


def test_a_row_with_an_image_is_refused(checkpoint: Checkpoint) -> None:
    """Its features would be left out."""
    runner, _ = load(checkpoint("codegen"))
    step = plan(sequences([[5, 6, 7], [8, 9]], new=2), [3, 2])
    step.features = PlacedFeatures(np.array([1, 2]), np.ones((2, 64), np.float32))
    first, second = runner.step(step).rows
    assert first.fault is not None and "images of this model are not served" in first.fault
    assert second.fault is None and len(second.token_ids) == 1
