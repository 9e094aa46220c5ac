"""Adapters in the CPU kernels say what transformers with PEFT says, row by row and to the bit."""

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
from tests.shard.cpu_backend.kernel_support import (
    COMPRESSED,
    FITTING,
    HYBRIDS,
    MIXTURES,
    NEWER,
    RARE,
    cpu_runner,
)
from tests.shard.torch_backend.models_support import (
    advance,
    drafting_plan,
    generated,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.shard.cpu_backend.instructions import has_amx, has_dot, list_pairs, multiplies_codes
from tgi_trio.shard.cpu_backend.weight_layout import Pairs
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 12
PROMPTS = prompts(9)
Checkpoint = Callable[..., Path]


# Experts, states and latents are not adapted; of what few families have, the order of parallel
# branches counts here, and of the newer ones, which are made of what others have, norms behind
# sublayers. Phi's heads are narrow here: zeros lie behind what adapters add, too.
SIZES = FITTING | {"phi": {"hidden_size": 320}}
UNADAPTED = MIXTURES | RARE | HYBRIDS | NEWER | COMPRESSED
ADAPTED = [
    *(FITTING.keys() - UNADAPTED.keys()),
    *("phi", "glm4", "bitnet"),
]
# Biases and none, matrices stored [in, out], fused gates and ups, heads that share keys.
WITH_HEADS = ("llama", "gpt2", "gemma2", "granite", "phi")  # tied, capped, scaled, with a bias
WITH_MAGNITUDES = ("llama", "qwen2", "gpt2", "phi3", "gpt_bigcode")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", sorted(ADAPTED))
def test_every_family(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Rows of two adapters and of none, in chunks, joining as others decode, on two threads."""
    base = checkpoint(family, **SIZES[family])
    folders = [write_adapter(base, tmp_path / str(r), seed=r, r=r) for r in (4, 3)]
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        plain = sequences(PROMPTS[:6], new=NEW)
        run(runner, plain)
        alone = [recorder.logits(row.id) for row in plain]
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(PROMPTS[:6], new=NEW), [1, 0, 2, 1, 2, 0])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row)
        assert not torch.allclose(recorder.logits(0)[0], alone[0][0])
        again = sequences(PROMPTS[:6], new=NEW)
        run(runner, again)  # loaded and not used: to the bit what it was
        assert all(torch.equal(recorder.logits(i), found) for i, found in enumerate(alone))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", WITH_MAGNITUDES)
def test_magnitudes_and_biases_beside_plain_ones(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    """DoRA, LoRA, LoRA with biases of its own, and none in one batch, on two threads."""
    base = checkpoint(family, **SIZES[family])
    configs: tuple[dict[str, Any], ...] = (
        {"use_dora": True},
        {"r": 3},
        {"lora_bias": True, "use_rslora": True},
        {"use_dora": True, "r": 5, "exclude_modules": r".*(o_proj|down_proj|c_proj)"},
    )
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, **each) for i, each in enumerate(configs)
    ]
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=8, cores=(0, 0)) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(PROMPTS[:8], new=NEW), [1, 0, 2, 1, 3, 4, 0, 2])
        run(runner, rows, chunk=9, joins=3)
        for row in rows:
            check(golden, recorder, row)


@pytest.mark.parametrize("family", SCALED_INPUTS)
def test_biases_of_linears_whose_inputs_are_scaled(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    """The factor is not that of what an adapter adds as a bias."""
    base, targets = checkpoint(family, **SIZES[family]), SCALED_INPUTS[family]
    folder = write_adapter(base, tmp_path / "a", target_modules=targets, lora_bias=True)
    golden = PeftGolden(base, [folder])
    with cpu_runner(base, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        install(runner, 1, folder)
        rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 1, 1])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", WITH_HEADS)
def test_the_head(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Alone and with layers, tied to the embedding or not, on two threads; also for prompts."""
    base = checkpoint(family, **SIZES[family])
    layers = r".*(layers|h)\.\d+\..*(proj|dense|fc\d|c_fc|c_attn)"
    configs: tuple[dict[str, Any], ...] = (
        {"target_modules": ["lm_head"]},
        {},
        {"target_modules": rf"{layers}|lm_head", "use_dora": True, "r": 3},
    )
    folders = [
        write_adapter(base, tmp_path / str(i), seed=i, **each) for i, each in enumerate(configs)
    ]
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(PROMPTS[:6], new=NEW), [1, 0, 2, 3, 1, 3])
        run(runner, rows, chunk=9, joins=3)
        for row in rows:
            check(golden, recorder, row)
        check_prompts(golden, runner, adapted(sequences(PROMPTS[:3], new=1), [1, 0, 3]))


@pytest.mark.parametrize("dora", [False, True])
def test_biases_of_the_base(checkpoint: Checkpoint, tmp_path: Path, dora: bool) -> None:
    """PEFT leaves them in the base, so it has no other adapter here, and no row without one."""
    base = checkpoint("qwen2", **SIZES["qwen2"])
    folder = write_adapter(base, tmp_path / "a", bias="all", use_dora=dora)
    golden = PeftGolden(base, [folder])
    with cpu_runner(base, max_lora_rank=4) as (runner, recorder):
        install(runner, 1, folder)
        rows = adapted(sequences(PROMPTS[:3], new=NEW), [1, 1, 1])
        run(runner, rows)
        for row in rows:
            check(golden, recorder, row)


@pytest.mark.parametrize(
    ("family", "gates"), [("qwen3_5_text", "q_proj"), ("lfm3", "self_attn.gate_proj")]
)
def test_gates_that_lie_behind_values(
    checkpoint: Checkpoint, tmp_path: Path, family: str, gates: str
) -> None:
    """A gate for each feature, of the queries' own matrix, and one for each head."""
    base = checkpoint(family, **HYBRIDS[family])
    modules = [gates, "k_proj", "v_proj", "down_proj"]
    folder = write_adapter(base, tmp_path / "a", r=4, target_modules=modules)
    golden = PeftGolden(base, [folder])
    with cpu_runner(base, max_lora_rank=4) as (runner, recorder):
        install(runner, 1, folder)
        rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 1, 1])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row, 2e-3)


def test_gates_that_are_cut_at_a_bound(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Gates and ups lie one behind the other there, not in turns; others join them in a stream."""
    own = {"head_dim": 32, "hidden_size_per_layer_input": 32, "laurel_rank": 32}
    base = checkpoint("gemma3n_text", **own, **GEMMA3N_SPARSE)
    modules = ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    folder = write_adapter(base, tmp_path / "a", r=4, target_modules=modules)
    golden = PeftGolden(base, [folder])
    with cpu_runner(base, max_lora_rank=4) as (runner, recorder):
        install(runner, 1, folder)
        rows = adapted(sequences(PROMPTS[:4], new=8), [1, 0, 1, 1])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row, 2e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", TOKEN_ROWS)
def test_rows_of_tokens(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Beside LoRA, of some adapters and none in one batch."""
    base = checkpoint(family, **FITTING[family])
    configs = TOKEN_ROWS[family]
    folders = [write_adapter(base, tmp_path / str(i), seed=i, **c) for i, c in enumerate(configs)]
    golden = PeftGolden(base, folders)
    tokens = {3, 5, 7, 9, 11, 40}
    some = [[*sorted(tokens), *prompt] for prompt in PROMPTS[:5]]
    with cpu_runner(base, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(some, new=NEW), [1, 0, min(2, len(folders)), 1, len(folders)])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row)


@pytest.mark.parametrize("tokens", [CUT, PADDED])
@pytest.mark.parametrize("config", CUT_VOCABULARIES)
def test_vocabularies_of_another_size(
    llama: Path, tmp_path: Path, config: dict[str, Any], tokens: int
) -> None:
    folder = write_adapter(llama, tmp_path / "cut", tokens=tokens, **config)
    golden = PeftGolden(llama, [folder], tokens)
    some = [[*SAVED_ROWS, *(token % CUT for token in prompt)] for prompt in PROMPTS[:4]]
    with cpu_runner(llama, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        install(runner, 1, folder)
        rows = adapted(sequences(some, new=1), [1, 0, 1, 1])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check_cut(golden, recorder, row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", AROUND_LATENTS)
def test_latents(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Linears around latents; see `AROUND_LATENTS`."""
    base = checkpoint(family, **COMPRESSED[family])
    config = {"target_modules": AROUND_LATENTS[family]}
    folders = [write_adapter(base, tmp_path / str(r), seed=r, r=r, **config) for r in (4, 3)]
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 2, 1])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row)


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", **FITTING["llama"])


def test_eight_adapters_and_the_base(llama: Path, tmp_path: Path) -> None:
    """Patterns, rsLoRA, few modules, ranks from 1 to 64, and a prompt of many tiles."""
    configs: tuple[dict[str, Any], ...] = (
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp.*": 7}},
        {"alpha_pattern": {"v_proj": 1}, "r": 17},
        {"use_rslora": True, "r": 16},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["up_proj", "o_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.(k_proj|down_proj)", "lora_alpha": 3},
        {"r": 64},
        {"r": 1, "rank_pattern": {"gate_proj": 5}},
    )
    folders = [
        write_adapter(llama, tmp_path / str(i), seed=i, **each) for i, each in enumerate(configs)
    ]
    golden = PeftGolden(llama, folders)
    with cpu_runner(llama, max_lora_rank=64) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(PROMPTS, new=NEW), [3, 0, 1, 2, 4, 5, 6, 7, 8])
        run(runner, rows, chunk=50, joins=4)
        for row in rows:
            check(golden, recorder, row)


@pytest.mark.parametrize("pairs", ["float32", "dot", "amx"])
def test_others_adapters_change_no_bit(llama: Path, tmp_path: Path, pairs: Pairs) -> None:
    """The same batch, other rows' adapters exchanged: the same logits to the bit."""
    if not {"float32": True, "dot": has_dot(), "amx": has_amx()}[pairs]:
        pytest.skip("this machine does not multiply pairs of bfloat16 so")
    folders = [
        write_adapter(llama, tmp_path / str(r), seed=r, r=r, use_dora=r == 16) for r in (4, 16, 1)
    ]
    dtype = "float32" if pairs == "float32" else "bfloat16"
    with cpu_runner(llama, dtype, pairs=pairs, max_lora_rank=16, cores=(0, 0)) as (
        runner,
        recorder,
    ):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        found = []
        for own in (1, 0):
            for others in ([1, 1, 1, 1, 1], [2, 0, 3, 1, 0], [0, 0, 0, 0, 0]):
                rows = adapted(sequences(PROMPTS[:6], new=NEW), [own, *others])
                run(runner, rows, chunk=16, joins=6)
                found.append((generated(rows[0]), recorder.logits(rows[0].id)))
                recorder.by_place.clear()
        for i, (tokens, logits) in enumerate(found):
            first = found[i // 3 * 3]
            assert tokens == first[0] and torch.equal(logits, first[1])
        assert not torch.equal(found[0][1], found[3][1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("quantize", ["eetq", "eetq by rows", "q4_0", "q8_0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_quantised_bases(
    checkpoint: Checkpoint, tmp_path: Path, quantize: str, dtype: str, dora: bool
) -> None:
    """What torch computes with the same rounded weights and the same adapter, and without.

    99 tokens: more than the rows that what adapters add is computed for at once.
    """
    base = checkpoint("llama", hidden_size=128, head_dim=32, intermediate_size=256)
    folder = write_adapter(base, tmp_path / "a", r=4, use_dora=dora)
    by_rows = quantize.endswith("by rows")
    if by_rows and not multiplies_codes():
        pytest.skip("this machine has no matrix unit for bytes")
    quantize = quantize.removesuffix(" by rows")
    reference, recorder = load(base, quantize=quantize, max_lora_rank=4)
    install(reference, 1, folder)
    run(reference, adapted(sequences([PROMPTS[5]] * 3, new=1), [0, 1, 1]))
    wanted = [recorder.logits(i) for i in range(3)]
    int8 = quantize == "eetq" and not by_rows
    with cpu_runner(
        base,
        dtype,
        int8=int8,
        int8_by_rows=by_rows,
        quantize=None if int8 else quantize,
        pairs=list_pairs()[0],
        max_lora_rank=4,
    ) as (runner, recorder):
        install(runner, 1, folder)
        run(runner, adapted(sequences([PROMPTS[5]] * 3, new=1), [0, 1, 1]))
        found = [recorder.logits(i) for i in range(3)]
    assert not torch.allclose(wanted[0], wanted[1], atol=0.5)
    limit = {"float32": 2e-3, "bfloat16": 0.15}[dtype] * (1 + dora)  # magnitudes of twice the norms
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=0.0)


def test_drafts(llama: Path, tmp_path: Path) -> None:
    """Drafts are computed with the adapter of their row."""
    folder = write_adapter(llama, tmp_path / "a")
    with cpu_runner(llama, max_lora_rank=4) as (runner, _):
        install(runner, 1, folder)
        plain = adapted(sequences(PROMPTS[2:4], new=NEW), [1, 0])
        run(runner, plain)
        rows = adapted(sequences(PROMPTS[2:4], new=NEW), [1, 0])
        advance(runner, rows, [len(prompt) for prompt in PROMPTS[2:4]])
        result = runner.step(drafting_plan(rows, [generated(plain[0])[1:4], [3, 3, 3]]))
        assert list(result.rows[0].token_ids) == generated(plain[0])[1:5]
        assert result.rows[1].token_ids[0] == generated(plain[1])[1]
