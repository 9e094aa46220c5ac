"""Families of every kind over the stand-in device say what they say on the CPU, recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, prompts

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    FallingTimes,
    Foretelling,
    agree,
    drive,
    start,
)
from tgi_trio.ipc.shard_settings import ShardSettings  # noqa: E402
from tgi_trio.model.config import read_config  # noqa: E402
from tgi_trio.shard.torch_backend import device_parts  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import few_heads, split_kv  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears import few_rows, lone_shares  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.joined import JoinedLinears  # noqa: E402
from tgi_trio.shard.torch_backend.models import beginning  # noqa: E402
from tgi_trio.shard.torch_backend.models.layer import Layer  # noqa: E402
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE, GEMMA4_E, GEMMA4_MOE  # noqa: E402

TEXTS = prompts(2, longest=2 * BLOCK)
# How tokens are chosen is test_device_requests.py's and test_device_sampler.py's.
ASKED: list[dict[str, Any]] = [{}, {}]
# One of every kind of layer: norms, positions, gates, biases, windows, caps, experts, latents.
FAMILIES = (
    *("qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "bloom", "falcon"),
    *("cohere", "olmo2", "stablelm", "mpt", "opt", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    # Sums that are normalised; norms without weights, and heads that turn backwards.
    *("openai-gpt", "nanochat"),
    # Norms of what the last linears read.
    "bitnet",
    # And of every kind that keeps a state.
    *("lfm2", "qwen3_5_text", "bamba", "bailing_hybrid"),
    # Experts parallel to attention, weighted by sigmoids; heads that differ in number, with gates.
    *("cohere2_moe", "laguna"),
    "cohere_compass_text",  # whose kinds of layers turn otherwise, or not at all
    # And experts of which some return their input, whose result joins behind the next layer.
    "longcat_flash",
    # Layers that differ in what they keep of a token, or keep nothing; values that are keys, are
    # normalised, or narrower than keys.
    *("gemma4_text", "gemma3n_text", "mimo_v2_flash"),
    # Chunks, queries scaled by position, and experts whose weights multiply what goes into them.
    "llama4_text",
)
# Whose positions nothing turns, or more than one table.
APART = (
    *("gpt2", "bloom", "mpt", "opt", "gemma3_text", "laguna", "openai-gpt", "nanochat"),
    *("gemma4_text", "gemma3n_text", "mimo_v2_flash", "llama4_text"),
)
# Whose heads are rotated at most, and whose attention has the norm before it for itself.
TURNED = (
    *("qwen2", "gemma2", "phi3", "gpt2", "bloom", "stablelm", "mpt", "opt", "gpt_oss", "bamba"),
    *("openai-gpt", "bitnet"),
)
SHARPER = {  # queries and keys are longer behind their turn
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Other shapes of families: heads of 512, as Gemma 4 has; layers that read the keys of others;
# experts beside an MLP, with factors of their own; heads that are normalised behind their turn;
# gates that are cut at a bound; queries over latents that are scaled by their position.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "large heads": ("gemma4_text", {"head_dim": 256, "global_head_dim": 512}),
    "no keys of their own": ("gemma4_text", GEMMA4_E),
    "experts beside": ("gemma4_text", GEMMA4_MOE),
    "normalised last": ("llama4_text", {"rope_parameters": SHARPER}),
    "scaled and rotated": ("ministral3", {}),
    "gates are cut": ("gemma3n_text", GEMMA3N_SPARSE),
    "over latents, scaled": ("mistral4", {"num_hidden_layers": 1}),
}


@pytest.mark.sampled(7, first=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_it_says_on_the_cpu(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    monkeypatch.setattr(device_parts, "RecordedTime", FallingTimes)
    for module in (few_rows, few_heads):
        monkeypatch.setattr(module, "fits_few_rows", lambda linear: linear.packed is None)
    for module in (few_rows, few_heads, lone_shares, beginning):
        monkeypatch.setattr(module, "agree", lambda *_: True)  # warm-ups compute nothing
    folder = checkpoint(family)  # transformers makes it without a device
    expected = drive(start(folder, "cpu"), TEXTS, ASKED, 3)
    with StandInDevice() as device:
        runner: Any = start(folder, "cuda:0", (1, 2))
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
    assert all(each.linear.fused >= {1, 2} for each in runner.model.projections())
    assert all(each.linear.other_share for each in runner.model.projections())
    assert bool(runner.model.beginning.rows) == (family not in APART)
    turned = [own.linear.turned == {1} for own, _ in runner.model.head_projections()]
    assert all(turned) if family in TURNED else not any(turned)


def list_joined(layer: Layer) -> list[JoinedLinears]:
    """Return the products of a layer that are one where steps need both."""
    own = layer.attention
    assert own is not None
    entries = own.shared_key.entries if own.shared_key else None
    parts = own.latent, own.index, entries.index if entries else None
    every = layer.joined, *(part.joined for part in parts if part is not None)
    return [joined for joined in every if joined is not None]


JOINED = ("falcon_h1", "gemma3n_text", "deepseek_v32", "deepseek_v4", "axk2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", JOINED)
def test_joined_products_of_few_rows_are_ours(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where the warm-up finds them faster; each matrix is measured once."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    monkeypatch.setattr(device_parts, "RecordedTime", FallingTimes)
    for module in (few_rows, few_heads):
        monkeypatch.setattr(module, "fits_few_rows", lambda linear: linear.packed is None)
    for module in (few_rows, few_heads, lone_shares, beginning):
        monkeypatch.setattr(module, "agree", lambda *_: True)
    folder = checkpoint(family)
    expected = drive(start(folder, "cpu"), TEXTS, ASKED, 3)
    with StandInDevice() as device:
        runner: Any = start(folder, "cuda:0", (1, 2))
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    linears = list(runner.model.linears())
    assert len(linears) == len(set(map(id, linears)))
    joined = [each.whole for layer in runner.model.layers for each in list_joined(layer)]
    assert joined and all(each.few_rows.keys() >= {1, 2} for each in joined)


@pytest.mark.parametrize("family", JOINED)
def test_products_are_joined_where_batch_invariance_is_kept(
    checkpoint: Callable[..., Path], family: str
) -> None:
    folder, found = checkpoint(family), []
    with StandInDevice():
        for kept in (False, True):
            settings = ShardSettings(model_path=folder, dtype="float32", batch_invariant=kept)
            runner: Any = load_torch_runner(
                settings, read_config(settings.model_path), device="cuda:0"
            )
            joined = [list_joined(layer) for layer in runner.model.layers]
            assert {each.whole.invariant for layer in joined for each in layer} == {kept}
            found.append([len(each) for each in joined])
    assert found[0] == found[1] and any(found[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "changes"), SHAPES.values(), ids=SHAPES)
def test_layers_of_other_shapes(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    monkeypatch.setattr(device_parts, "RecordedTime", FallingTimes)
    for module in (few_rows, few_heads, lone_shares, beginning):
        monkeypatch.setattr(module, "agree", lambda *_: True)
    folder = checkpoint(family, **changes)
    expected = drive(start(folder, "cpu"), TEXTS, ASKED, 3)
    with StandInDevice() as device:
        ours = drive(start(folder, "cuda:0", (1, 2)), TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)


def test_drafts_through_states_are_computed_one_after_another(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded like prompts, and undone where they are wrong; nothing is waited for."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    folder = checkpoint("lfm2")
    expected = drive(start(folder, "cpu"), TEXTS[1:], ASKED, 6, late=0)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (4,), speculate=2)
        drafter = Foretelling(expected.tokens)
        ours = drive(runner, TEXTS[1:], ASKED, 6, device=device, drafter=drafter, late=0)
    agree(ours, expected)
    assert ours.drafts > 2
    assert all(counts.replays == 1 for counts in ours.decodes)
