"""Trained heads: what they draft, and that nothing but the number of steps comes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.speculation.heads_support import (
    HEADS,
    Reference,
    Watched,
    answer,
    counting_model,
    find_drafts,
    medusa,
    mlp_speculator,
    vllm_medusa,
    write_heads,
)
from tests.shard.torch_backend.models_support import GreedyRecorder
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.speculators.recognise import read_heads
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.runner import Drafter, Runner
from tgi_trio.testing.checkpoints import make_checkpoint

HIDDEN, VOCAB = 64, 512
PROMPTS = [
    [5, 6, 7, 8, 9],
    [40, 41, 42],
    [7, 300, 21, 22, 4, 9, 9, 3, 12, 90, 91, 14, 33, 8, 2, 6, 7],
]
# Logits that rounding may turn around: the kernels have heads of 8 bits.
NEAR = {"torch": 1e-4, "kernels": 0.05}
PLAIN = [SamplingParameters(ignore_eos=True)] * 3


def wide_medusa(folder: Path, base: Path, hidden: int, vocab: int) -> Path:
    """Write heads in float64."""
    written = medusa(folder, base, hidden, vocab, layers=1, own=True)
    (file,) = written.glob("*.safetensors")
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file)
    return written


WRITERS: dict[str, Callable[..., Path]] = {
    "medusa 1": partial(medusa, layers=1, own=True),
    "medusa 1 of 64 bits": wide_medusa,
    "medusa 2": partial(medusa, layers=1, own=False),
    "medusa 2, two layers": partial(medusa, layers=2, own=False),
    "medusa of vllm": vllm_medusa,
    "mlp": partial(mlp_speculator, tied=False),
    "mlp, tied": partial(mlp_speculator, tied=True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama", head_dim=32)


@pytest.fixture(scope="module")
def reference(base: Path) -> Reference:
    return Reference(base)


def load(base: Path, heads: Path | None, backend: str, quantize: str | None = None) -> Runner:
    settings = ShardSettings(
        quantize=quantize,
        model_path=base, draft_model=heads, cpu_backend=backend, cpu_threads=1,
        tokenizer_file=base / "tokenizer.json",
    )  # fmt: skip
    return load_runner(settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("kind", WRITERS)
def test_heads_draft_what_their_format_says(
    kind: str, backend: str, base: Path, reference: Reference, tmp_path: Path
) -> None:
    heads = WRITERS[kind](tmp_path / "heads", base, HIDDEN, VOCAB)
    tensors = load_file(next(heads.glob("*.safetensors"))) | {"base": reference.head}
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    runner = load(base, heads, backend)
    drafter = runner.drafter(HEADS)
    assert drafter is not None
    watched = Watched(drafter)
    with_heads = answer(runner, PROMPTS, PLAIN, 12, drafter=watched)
    assert with_heads.tokens == answer(runner, PROMPTS, PLAIN, 12).tokens
    some = [(known, own) for known, own in watched.drafted if own]
    assert len(some) >= 3 and max(len(own) for _, own in some) >= 2
    for known, own in some:
        hidden = reference.hidden(known[:-1])
        expected = find_drafts(heads, tensors, hidden, known[-1], NEAR[backend])
        for place, token in enumerate(own):
            assert token in expected[place]
            if len(expected[place]) > 1:  # what follows depends on which it was
                break


ASKED = [
    SamplingParameters(sample=True, seed=3, temperature=0.9, ignore_eos=True),
    SamplingParameters(repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True),
    SamplingParameters(grammar='{"grammars": [{"lark_grammar": "start: /[a-z ]+/"}]}'),
]


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_the_tokens_are_those_of_plain_decoding_however_they_are_chosen(
    backend: str, base: Path, tmp_path: Path
) -> None:
    runner = load(base, medusa(tmp_path / "h", base, HIDDEN, VOCAB, layers=1, own=True), backend)
    for budget in (64, 4):  # the second computes prompts in pieces
        plain = answer(runner, PROMPTS, ASKED, 16, budget=budget)
        drafted = answer(runner, PROMPTS, ASKED, 16, budget=budget, drafter=runner.drafter(HEADS))
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_heads_that_are_always_right_bring_all_their_tokens(backend: str, tmp_path: Path) -> None:
    counting_model(tmp_path / "model", tmp_path / "heads")
    runner = load(tmp_path / "model", tmp_path / "heads", backend)
    asked = [SamplingParameters(ignore_eos=True)]
    drafter = runner.drafter(HEADS)
    found = answer(runner, [[10, 11]], asked, 20, drafter=drafter)
    assert found.tokens[0] == list(range(12, 32))
    # The prompt, then four tokens a step; a few steps are plain, to measure what drafting brings.
    assert found.steps <= 1 + 20 // (1 + HEADS) + 4
    assert answer(runner, [[10, 11]], asked, 20).steps == 20


@pytest.mark.parametrize("quantize", ["eetq", "q4_0"])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_heads_that_share_a_rounded_head_of_the_model(
    backend: str, quantize: str, tmp_path: Path
) -> None:
    counting_model(tmp_path / "model", tmp_path / "own")
    # Blocks that change nothing: the model's head says again what it has said, the last token.
    tensors = load_file(tmp_path / "own" / "medusa_lm_head.safetensors")
    same = {name: tensor for name, tensor in tensors.items() if ".0.linear" in name}
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
    heads = write_heads(tmp_path / "heads", config, same, "medusa_lm_head.safetensors")
    runner = load(tmp_path / "model", heads, backend, quantize)
    watched = Watched(_drafter(runner))
    asked = [SamplingParameters(ignore_eos=True)] * 2
    prompts = [[10, 11], [200, 201]]
    found = answer(runner, prompts, asked, 10, drafter=watched)
    assert found.tokens == {0: list(range(12, 22)), 1: list(range(202, 212))}
    some = [(known, own) for known, own in watched.drafted if own]
    assert some and all(set(own) == {known[-1]} for known, own in some)


def test_nothing_is_drafted_beyond_the_end(tmp_path: Path) -> None:
    counting_model(tmp_path / "model", tmp_path / "heads")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 1', '"eos_token_id": 15'))
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    runner = load(tmp_path / "model", tmp_path / "heads", "torch")
    drafter = runner.drafter(HEADS)
    assert drafter is not None and runner.info.eos_ids == (15,)
    watched = Watched(drafter)
    found = answer(runner, [[10, 11]], [SamplingParameters()], 20, drafter=watched)
    assert found.tokens[0] == [12, 13, 14, 15]
    assert all(15 not in own for _, own in watched.drafted)


def test_heads_for_another_model_are_refused_by_the_tensor(base: Path, tmp_path: Path) -> None:
    heads = medusa(tmp_path / "heads", base, 32, VOCAB, layers=1, own=False)
    with pytest.raises(ModelLoadError, match=r"0\.0\.linear.*\[32, 32\].*need \[64, 64\]"):
        load(base, heads, "torch")
    speculator = mlp_speculator(tmp_path / "mlp", base, 32, VOCAB, tied=False)
    with pytest.raises(ModelLoadError, match=r"emb_dim is 32, the model's is 64"):
        read_heads(speculator, hidden=HIDDEN, vocabulary=VOCAB)


def test_heads_beside_two_ranks_say_what_one_says(base: Path, tmp_path: Path) -> None:
    heads = medusa(tmp_path / "h", base, HIDDEN, VOCAB, layers=1, own=False)
    alone = load(base, heads, "torch")
    expected = answer(alone, PROMPTS, PLAIN, 10)
    one = Watched(_drafter(alone))
    answer(alone, PROMPTS, PLAIN, 10, drafter=one)
    with ranks_of(base, 2, GreedyRecorder(), draft_model=heads) as runner:
        two = Watched(_drafter(runner))
        found = answer(runner, PROMPTS, PLAIN, 10, drafter=two)
    assert found.tokens == expected.tokens and found.drafts > 0
    drafted = {tuple(known): own for known, own in one.drafted if own}
    both = [(own, drafted[tuple(known)]) for known, own in two.drafted if tuple(known) in drafted]
    assert both and all(a[: len(b)] == b[: len(a)] for a, b in both if a)


def _drafter(runner: Runner) -> Drafter:
    found = runner.drafter(HEADS)
    assert found is not None
    return found
