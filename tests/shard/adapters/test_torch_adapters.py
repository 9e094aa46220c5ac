"""Adapters on the torch backend say what transformers with PEFT says, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.adapters.peft_support import (
    AROUND_LATENTS,
    CUT,
    CUT_VOCABULARIES,
    PADDED,
    SAVED_ROWS,
    SCALED_INPUTS,
    TOKEN_ROWS,
    PeftGolden,
    adapted,
    check,
    check_cut,
    check_prompts,
    install,
    write_adapter,
)
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    advance,
    drafting_plan,
    generated,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.ipc.startup import WarmupRequest

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 12
PROMPTS = prompts(9)

# Every family whose linears have names, and the ways of storing them.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo"),
    *("olmo2", "olmo3", "granite", "cohere", "cohere2", "stablelm", "starcoder2", "phi"),
    *("gpt2", "gpt_bigcode", "gptj", "gpt_neox", "opt", "bloom", "falcon", "mpt", "bitnet"),
)
# Biases and none, matrices stored [in, out], fused in every way, heads that share keys.
WITH_MAGNITUDES = ("llama", "qwen2", "gpt2", "phi3", "bloom", "gpt_bigcode", "falcon", "opt")
# With a matrix of its own or the embedding's, scaled, capped, with a bias.
WITH_HEADS = ("llama", "gpt2", "gemma2", "granite", "cohere", "phi")
HEAD_AND_LAYERS = r".*(layers|h)\.\d+\..*(proj|dense|fc\d|c_fc|c_attn)|lm_head"
ATTENTION = {  # of mixtures of experts: what is around them
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "minimax_m3_vl_text": ["q_proj", "k_proj", "o_proj"],  # an index has some of its own
    "qwen3_moe": ["q_proj", "v_proj"],
    "laguna": ["q_proj", "o_proj", "g_proj"],
    **AROUND_LATENTS,
}


@pytest.fixture
def serve(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    def load_all(family: str, *configs: dict[str, Any], **options: Any) -> Any:
        base = checkpoint(family)
        folders = [
            write_adapter(base, tmp_path / str(i), seed=i, **config)
            for i, config in enumerate(configs)
        ]
        runner, recorder = load(base, max_lora_rank=64, **options)
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        return runner, recorder, PeftGolden(base, folders)

    return load_all


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", [*FAMILIES, *ATTENTION])
def test_every_family(serve: Callable[..., Any], family: str) -> None:
    """Rows of two adapters and of none, in chunks, joining as others decode."""
    targets = {"target_modules": ATTENTION[family]} if family in ATTENTION else {}
    runner, recorder, golden = serve(family, targets, targets | {"r": 3})
    rows = adapted(sequences(PROMPTS[:6], new=NEW), [1, 0, 2, 1, 2, 0])
    run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check(golden, recorder, row)
    found = recorder.logits(rows[0].id)[0]
    alone = sequences(PROMPTS[:1], new=NEW)
    run(runner, alone)
    assert not torch.allclose(recorder.logits(alone[0].id)[0], found)  # else nothing is shown


def test_magnitudes_of_what_expands_latents(serve: Callable[..., Any]) -> None:
    """The matrix is not multiplied as it is, so there are no outputs that gains would scale."""
    with pytest.raises(ModelLoadError, match=r"biases of .*kv_b_proj: of what expands latents"):
        serve("minicpm3", {"target_modules": ["kv_b_proj"], "use_dora": True})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", TOKEN_ROWS)
def test_rows_of_tokens(serve: Callable[..., Any], family: str) -> None:
    """Beside LoRA, of some adapters and none in one batch."""
    runner, recorder, golden = serve(family, *TOKEN_ROWS[family])
    tokens = {3, 5, 7, 9, 11, 40}
    some = [[*sorted(tokens), *prompt] for prompt in PROMPTS[:5]]
    last = len(golden.adapted.peft_config)
    rows = adapted(sequences(some, new=NEW), [1, 0, min(2, last), 1, last])
    run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check(golden, recorder, row)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tokens", [CUT, PADDED])
@pytest.mark.parametrize("config", CUT_VOCABULARIES)
def test_vocabularies_of_another_size(
    checkpoint: Callable[..., Path], tmp_path: Path, config: dict[str, Any], tokens: int
) -> None:
    """What an adapter lacks of the model's stays; what it has beyond, to pad with, is left out."""
    base = checkpoint("llama")
    folder = write_adapter(base, tmp_path / "cut", tokens=tokens, **config)
    golden = PeftGolden(base, [folder], tokens)
    runner, recorder = load(base, max_lora_rank=64)
    install(runner, 1, folder)
    some = [[*SAVED_ROWS, *(token % CUT for token in prompt)] for prompt in PROMPTS[:4]]
    rows = adapted(sequences(some, new=1), [1, 0, 1, 1])
    run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check_cut(golden, recorder, row)


def test_the_whole_of_the_format(serve: Callable[..., Any]) -> None:
    """Eight adapters and the base in one batch: patterns, rsLoRA, few modules, large ranks."""
    runner, recorder, golden = serve(
        "llama",
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp.*": 7}},
        {"alpha_pattern": {"v_proj": 1, "layers.0.self_attn.q_proj": 32}},
        {"use_rslora": True, "r": 16},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["up_proj", "o_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.(k_proj|down_proj)", "lora_alpha": 3},
        {"r": 64, "init_lora_weights": "gaussian"},
        {"r": 1, "rank_pattern": {"gate_proj": 5}, "alpha_pattern": {"gate_proj": 2}},
    )
    rows = adapted(sequences(PROMPTS, new=NEW), [3, 0, 1, 2, 4, 5, 6, 7, 8])
    run(runner, rows, chunk=20, joins=4)
    for row in rows:
        check(golden, recorder, row)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", WITH_MAGNITUDES)
def test_magnitudes_and_biases_beside_plain_ones(serve: Callable[..., Any], family: str) -> None:
    """DoRA, LoRA, LoRA with biases of its own, and none in one batch."""
    runner, recorder, golden = serve(
        family,
        {"use_dora": True},
        {"r": 3},
        {"lora_bias": True, "use_rslora": True},
        {"use_dora": True, "r": 5, "exclude_modules": r".*(o_proj|down_proj|c_proj)"},
    )
    rows = adapted(sequences(PROMPTS[:8], new=NEW), [1, 0, 2, 1, 3, 4, 0, 2])
    run(runner, rows, chunk=9, joins=3)
    for row in rows:
        check(golden, recorder, row)


@pytest.mark.parametrize("family", SCALED_INPUTS)
def test_biases_of_linears_whose_inputs_are_scaled(serve: Callable[..., Any], family: str) -> None:
    """The factor is not that of what an adapter adds as a bias."""
    targets = SCALED_INPUTS[family]
    runner, recorder, golden = serve(family, {"target_modules": targets, "lora_bias": True})
    rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 1, 1])
    run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check(golden, recorder, row)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", WITH_HEADS)
def test_the_head(serve: Callable[..., Any], family: str) -> None:
    """Alone and with layers, tied to the embedding or not; also for prompts and drafts."""
    runner, recorder, golden = serve(
        family,
        {"target_modules": ["lm_head"]},
        {},
        {"target_modules": HEAD_AND_LAYERS, "use_dora": True, "r": 3},
    )
    rows = adapted(sequences(PROMPTS[:6], new=NEW), [1, 0, 2, 3, 1, 3])
    run(runner, rows, chunk=9, joins=3)
    for row in rows:
        check(golden, recorder, row)


def test_the_prompts_logprobs_are_of_the_adapted_head(serve: Callable[..., Any]) -> None:
    runner, _, golden = serve("llama", {"target_modules": ["lm_head"]})
    rows = adapted(sequences(PROMPTS[:3], new=1), [1, 0, 1])
    check_prompts(golden, runner, rows)


@pytest.mark.parametrize("dora", [False, True])
def test_biases_of_the_base(serve: Callable[..., Any], dora: bool) -> None:
    """PEFT leaves them in the base, so it has no other adapter here, and no row without one."""
    runner, recorder, golden = serve("qwen2", {"bias": "all", "use_dora": dora})
    rows = adapted(sequences(PROMPTS[:3], new=NEW), [1, 1, 1])
    run(runner, rows)
    for row in rows:
        check(golden, recorder, row)


def test_others_adapters_change_no_bit(serve: Callable[..., Any]) -> None:
    """The same batch, other rows' adapters exchanged: the same logits to the bit."""
    runner, recorder, _ = serve("llama", {}, {"r": 16}, {"r": 1})
    found = []
    for others in ([1, 1, 1, 1, 1], [2, 0, 3, 1, 0], [0, 0, 0, 0, 0]):
        rows = adapted(sequences(PROMPTS[:6], new=NEW), [1, *others])
        run(runner, rows, chunk=16, joins=6)
        found.append((generated(rows[0]), recorder.logits(rows[0].id)))
        for row in rows:
            recorder.drop(row)
    for tokens, logits in found[1:]:
        assert tokens == found[0][0] and torch.equal(logits, found[0][1])


def test_drafts(serve: Callable[..., Any]) -> None:
    """Drafts are computed with the adapter of their row."""
    runner, _, _ = serve("llama", {})
    rows = adapted(sequences(PROMPTS[2:4], new=NEW), [1, 0])
    plain = adapted(sequences(PROMPTS[2:4], new=NEW), [1, 0])
    run(runner, plain)
    advance(runner, rows, [len(prompt) for prompt in PROMPTS[2:4]])
    told = [generated(row)[1:4] for row in plain]
    result = runner.step(drafting_plan(rows, [told[0], [3, 3, 3]]))
    assert list(result.rows[0].token_ids) == generated(plain[0])[1:5]
    assert result.rows[1].token_ids[0] == generated(plain[1])[1]


def test_quantised_bases(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An 8-bit base: what it says with an adapter is what it says with the sum in its place."""
    base = checkpoint("llama")
    folder = write_adapter(base, tmp_path / "a", r=4)
    runner, recorder = load(base, max_lora_rank=8, quantize="eetq")
    install(runner, 1, folder)
    rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 1, 0])
    run(runner, rows)
    plain, kept = load(base, quantize="eetq")
    own = sequences(PROMPTS[:4], new=NEW)
    run(plain, own)
    for row, wanted in zip(rows, own, strict=True):
        same = generated(row) == generated(wanted)
        assert same == (row.sampling.adapter == 0)
        if same:
            torch.testing.assert_close(recorder.logits(row.id), kept.logits(wanted.id))


def test_dropped_and_loaded_again(serve: Callable[..., Any], tmp_path: Path) -> None:
    runner, recorder, golden = serve("llama", {})
    host = runner.adapters
    first = host.load(AdapterOrder(1, tmp_path / "0"))
    host.drop(1)
    host.drop(1)
    again = host.load(AdapterOrder(2, tmp_path / "0", first.sha256))
    assert again.sha256 == first.sha256 and again.rank == 4 and again.nbytes > 0
    host.install(1, again)
    rows = adapted(sequences(PROMPTS[:2], new=NEW), [1, 0])
    run(runner, rows)
    for row in rows:
        check(golden, recorder, row)
    with pytest.raises(ModelLoadError, match="not those that were loaded before"):
        host.load(AdapterOrder(3, tmp_path / "0", bytes(32)))


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_four_ranks(checkpoint: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Adapters divided as the model is, K and V shared by ranks: what one process says."""
    base = checkpoint(family)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"r": 3, "use_dora": True, "target_modules": HEAD_AND_LAYERS},
        {"lora_bias": True},
    )
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, **each) for i, each in enumerate(kinds)
    ]
    golden, recorder = PeftGolden(base, folders), GreedyRecorder()
    with ranks_of(base, 4, recorder, max_lora_rank=4) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        for each in runner.runners:
            for number, folder in enumerate(folders, start=1):
                install(each, number, folder)
        rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 2, 3])
        run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check(golden, recorder, row)
