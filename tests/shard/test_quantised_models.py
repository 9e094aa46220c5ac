"""Quantised checkpoints give the tokens of their dequantised weights, on every backend."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    generated,
    load,
    prompts,
    run,
    sequence,
    sequences,
    tables,
)
from tests.support.bitnet import BITNET_OFFLINE, BITNET_ONLINE, store_bitnet
from tests.support.bitsandbytes_files import describe_bitsandbytes, store_bytes, store_table
from tests.support.exl3 import EXL3, store_exl3
from tests.support.lowered import store_hqq, store_mlx
from tests.support.quantised import (
    DATA,
    Store,
    describe_compressed,
    quantise,
    real_checkpoint,
    store_awq,
    store_exl2,
    store_fp8,
    store_gptq,
    store_int8,
    store_packed,
    store_pairs,
    store_powers,
)
from tests.support.quark import describe_quark, store_quark
from tests.support.torchao_files import TORCHAO, renamed, store_halves, store_shifted, store_tiles
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.runner import Runner

Make = Callable[..., Path]
Loaded = tuple[Runner, GreedyRecorder]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 16
FIRM = 0.25  # a margin that no rounding turns around


@contextmanager
def by_torch(folder: Path) -> Iterator[Loaded]:
    yield load(folder, dtype="float32")


@contextmanager
def by_kernels(folder: Path) -> Iterator[Loaded]:
    with cpu_runner(folder) as pair:
        yield pair


@contextmanager
def by_ranks(folder: Path) -> Iterator[Loaded]:
    recorder = GreedyRecorder()
    with ranks_of(folder, 2, recorder, dtype="float32") as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 511 * BLOCK))
        yield runner, recorder


backends = pytest.mark.parametrize("backend", [by_torch, by_kernels, by_ranks])
MADE_BY_OTHERS = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())


def check_expected(recorder: GreedyRecorder, row: Any, expected: dict[str, Any]) -> None:
    """Log-probabilities within 1e-3 and the tokens, as far as a slim margin leaves them equal."""
    scores = recorder.logits(row.id).log_softmax(-1)
    firm = 0
    for place, token in enumerate(generated(row)):
        wanted = expected["ids"][place]
        assert abs(float(scores[place, wanted]) - expected["logprobs"][place]) < 1e-3
        if token != wanted:
            assert expected["margin"][place] <= FIRM
            break
        firm += expected["margin"][place] > FIRM
    assert firm > 0


@pytest.mark.sampled(5)
@backends
@pytest.mark.parametrize("name", MADE_BY_OTHERS)
def test_what_other_tools_made(tmp_path: Path, name: str, backend: Any) -> None:
    folder = real_checkpoint(name, tmp_path)
    assert check_model(read_config(folder), Asked()) == []
    every = json.loads((DATA / name / "expected.json").read_text())
    ids = [expected["input_ids"] for expected in every]
    with backend(folder) as (runner, recorder):
        # Alone, then all twice at once. Ranks differ in parts of matrices, which rows do not.
        for count in (8,) if backend is by_ranks else (1, 8):
            for first in range(0, 8 if count == 8 else 4, count):
                some = [(first + i) % 4 for i in range(count)]
                blocks = tables([ids[i] for i in some], new=NEW)
                rows = [sequence(n, ids[i], blocks[n], NEW) for n, i in enumerate(some)]
                run(runner, rows, chunk=20)
                for row, i in zip(rows, some, strict=True):
                    check_expected(recorder, row, every[i])
                recorder.by_place.clear()


@pytest.mark.parametrize("name", MADE_BY_OTHERS)
def test_prompt_logprobs_of_what_other_tools_made(tmp_path: Path, name: str) -> None:
    """Every prompt token's, by prompts that end before it."""
    folder = real_checkpoint(name, tmp_path)
    expected = json.loads((DATA / name / "expected.json").read_text())[0]
    ids = expected["input_ids"]
    starts = [ids[:end] for end in range(1, len(ids))]
    with by_torch(folder) as (runner, recorder):
        blocks = tables(starts, new=1)
        rows = [sequence(i, start, blocks[i], 1) for i, start in enumerate(starts)]
        run(runner, rows)
        for row, token, wanted in zip(rows, ids[1:], expected["prompt_logprobs"], strict=True):
            score = recorder.logits(row.id).log_softmax(-1)[0, token]
            assert abs(float(score) - wanted) < 1e-3


GPTQ = {"quant_method": "gptq", "sym": False}
# How the matrices are stored, and what config.json says of it.
STORED: dict[str, tuple[Store, dict[str, Any]]] = {
    "gptq 4 bits": (store_gptq(4, 32), GPTQ | {"bits": 4, "group_size": 32}),
    "gptq 4 bits, acts": (
        store_gptq(4, 16, shuffled=True),
        GPTQ | {"bits": 4, "group_size": 16, "desc_act": True},
    ),
    "gptq 8 bits, v2": (
        store_gptq(8, 1 << 20, v2=True),
        GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "gptq 3 bits": (store_gptq(3, 32), GPTQ | {"bits": 3, "group_size": 32}),
    "gptq 2 bits": (store_gptq(2, 32), GPTQ | {"bits": 2, "group_size": 32}),
    "packed, 4 bits": (
        store_packed(4, 32),
        describe_compressed("pack-quantized", "group", 4, group_size=32, symmetric=False),
    ),
    "packed, 4 bits, acts": (
        store_packed(4, 16, shuffled=True),
        describe_compressed("pack-quantized", "group", 4, group_size=16, actorder="group"),
    ),
    "packed, 8 bits": (
        store_packed(8, 1 << 20, symmetric=True),
        describe_compressed("pack-quantized", "channel", 8),
    ),
    "int8": (store_int8("channel"), describe_compressed("int-quantized", "channel", 8)),
    "fp8 by tensor": (store_fp8("tensor"), describe_compressed("float-quantized", "tensor", 8)),
    "fp8 by channel": (store_fp8("channel"), describe_compressed("float-quantized", "channel", 8)),
    "fp8 by block": (
        store_fp8("block"),
        describe_compressed("float-quantized", "block", 8, block_structure=[24, 40]),
    ),
    "fp8 of DeepSeek": (
        store_fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]},
    ),
    "fp8 without blocks": (store_fp8("tensor"), {"quant_method": "fp8"}),
    "bitsandbytes": (store_bytes, describe_bitsandbytes("int8")),
    "nf4": (store_table("nf4", 64), describe_bitsandbytes("nf4")),
    "nf4, double": (store_table("nf4", 32, nested=5), describe_bitsandbytes("nf4")),
    "fp4 over rows": (store_table("fp4", 48), describe_bitsandbytes("fp4")),
    "exl2": (store_exl2((6, 32), (5, 64), (4, 32), (3, 32)), {"quant_method": "exl2", "bits": 4.3}),
    "exl2, 4 bits": (store_exl2((4, 64)), {"quant_method": "exl2", "bits": 4.0}),
    "exl3": (store_exl3(3), EXL3),
    "exl3, mcg": (store_exl3(5, "mcg"), EXL3),
    "exl3, mul1": (store_exl3(4, "mul1"), EXL3),
    "torchao, halves of bytes": (store_halves(32), TORCHAO),
    "torchao, tiles": (store_tiles(32), TORCHAO),
    "torchao, int8": (store_shifted, TORCHAO),
    "torchao, fp8": (renamed(store_fp8("channel")), TORCHAO),
    "quark, int4": (store_quark("int4", 32), describe_quark("int4")),
    "quark, uint4": (store_quark("uint4", 1 << 20, "order"), describe_quark("uint4", "order")),
    "quark, int8": (store_quark("int8", 32), describe_quark("int8")),
    "bitnet": (store_bitnet("packed"), BITNET_OFFLINE),
    "bitnet, trained": (store_bitnet("trained"), BITNET_ONLINE),
    **{
        f"mlx {bits} bits": (store_mlx(bits, 32), {"bits": bits, "group_size": 32})
        for bits in (3, 4, 5, 6, 8)
    },
    "hqq 4 bits": (store_hqq(4, 64), {"quant_method": "hqq"}),
    "hqq 3 bits": (store_hqq(3, 32), {"quant_method": "hqq"}),
    "hqq 4 bits, across": (store_hqq(4, 64, axis=0), {"quant_method": "hqq"}),
    "awq": (store_awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32}),
}


@pytest.mark.sampled(7)
@backends
@pytest.mark.parametrize("stored", STORED)
def test_tokens_of_what_is_packed_here(
    checkpoint: Make, tmp_path: Path, stored: str, backend: Any
) -> None:
    source = checkpoint("llama", **FITTING["llama"])
    folder = quantise(source, tmp_path / "q", *STORED[stored])
    golden, some = Golden(folder / "plain"), prompts(6)
    blocks = tables(some, shuffle=3, new=NEW)
    rows = [sequence(i, prompt, blocks[i], NEW) for i, prompt in enumerate(some)]
    with backend(folder) as (runner, recorder):
        run(runner, rows, chunk=20, joins=2)
        for row in rows:
            # The CPU kernels round activations to 16 bits.
            tolerance = 5e-3 if backend is by_kernels else 2e-4
            assert_greedy(golden, recorder, row, tolerance=tolerance)


def check_tokens(folder: Path, backend: Any = by_torch) -> None:
    """The tokens are those of the weights in the folder `plain` beside it."""
    assert check_model(read_config(folder), Asked()) == []
    golden, some = Golden(folder / "plain"), prompts(4)
    blocks = tables(some, new=NEW)
    rows = [sequence(i, prompt, blocks[i], NEW) for i, prompt in enumerate(some)]
    with backend(folder) as (runner, recorder):
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=2e-4)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", [by_torch, by_ranks])
@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("mixtral", "gptq 4 bits"),  # experts
        ("mixtral", "exl2"),
        ("mixtral", "exl3"),
        ("mixtral", "quark, int4"),
        ("mixtral", "torchao, halves of bytes"),
        ("phi3", "gptq 4 bits"),  # matrices that hold several
        ("phi3", "torchao, tiles"),
        ("phi3", "quark, int8"),
        ("deepseek_v3", "fp8 of DeepSeek"),  # a latent
    ],
)
def test_other_families(
    checkpoint: Make, tmp_path: Path, family: str, stored: str, backend: Any
) -> None:
    check_tokens(quantise(checkpoint(family), tmp_path / "q", *STORED[stored]), backend)


def test_deepseek_v4_as_it_is_published(checkpoint: Make, tmp_path: Path) -> None:
    """FP8 with powers of two, experts of 4 bits, and what compressors read as it was."""

    def store(module: str, weight: Any) -> Any:
        own = store_pairs if ".experts." in module else store_powers
        return own(module, weight, "scale")

    attention = (f".attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
    endings = (".w1.weight", ".w2.weight", ".w3.weight", ".indexer.wq_b.weight", *attention)
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
    said |= {"scale_fmt": "ue8m0", "expert_dtype": "fp4", "activation_scheme": "dynamic"}
    folder = quantise(checkpoint("deepseek_v4"), tmp_path / "q", store, said, endings=endings)
    assert check_model(read_config(folder), Asked()) == []
    golden, rows = Golden(folder / "plain"), sequences(prompts(6)[3:], new=NEW)
    runner, recorder = load(folder)
    run(runner, rows, chunk=20, joins=2)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=2e-4)


def test_layers_side_by_side_of_which_one_sorts_its_inputs(
    checkpoint: Make, tmp_path: Path
) -> None:
    """Attention and MLP read one norm: what sorts for the first must not reach the second."""
    sorting, plain = store_gptq(4, 32, shuffled=True), store_gptq(4, 32)

    def store(module: str, weight: Any) -> Any:
        return (sorting if module.endswith(("q_proj", "k_proj", "v_proj")) else plain)(
            module, weight
        )

    folder = quantise(
        checkpoint("cohere", **FITTING["cohere"]),
        tmp_path / "q",
        store,
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True},
    )
    golden, some = Golden(folder / "plain"), prompts(3)
    blocks = tables(some, new=NEW)
    rows = [sequence(i, prompt, blocks[i], NEW) for i, prompt in enumerate(some)]
    with by_kernels(folder) as (runner, recorder):
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=5e-3)


def test_experts_beside_a_router_that_sorts_its_inputs(checkpoint: Make, tmp_path: Path) -> None:
    """All read one norm, and experts have its activations in the order of the model."""
    sorting, plain = store_gptq(4, 32, shuffled=True), store_gptq(4, 32)

    def store(module: str, weight: Any) -> Any:
        return (sorting if module.endswith(".gate") else plain)(module, weight)

    folder = quantise(
        checkpoint("mixtral", **FITTING["mixtral"] | {"num_local_experts": 8}),
        tmp_path / "q",
        store,
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True},
        endings=(".gate.weight", ".w1.weight", ".w2.weight", ".w3.weight"),
    )
    golden, some = Golden(folder / "plain"), prompts(3)
    blocks = tables(some, new=NEW)
    rows = [sequence(i, prompt, blocks[i], NEW) for i, prompt in enumerate(some)]
    with by_kernels(folder) as (runner, recorder):
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=5e-3)


def test_bfloat16_of_quantised_weights(checkpoint: Make, tmp_path: Path) -> None:
    """Weights are rounded once, from what is stored to the dtype."""
    folder = quantise(checkpoint("llama"), tmp_path / "q", *STORED["awq"])
    found = []
    for each in (folder, folder / "plain"):
        runner, recorder = load(each, dtype="bfloat16")
        prompt = prompts(4)[-1]
        run(runner, [sequence(0, prompt, tables([prompt], new=NEW)[0], NEW)])
        found.append(recorder.logits(0))
    assert torch.equal(*found)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **said: Any) -> None:
    """Change a checkpoint's tensors, and what its config.json says."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))


@pytest.mark.parametrize("stored", ["exl2", "exl3"])
def test_exllama_divides_matrices_that_families_have_in_one(
    checkpoint: Make, tmp_path: Path, stored: str
) -> None:
    source = shutil.copytree(checkpoint("phi3", **FITTING["phi3"]), tmp_path / "source")
    whole = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
    spec = decoder_spec(read_config(source))
    assert spec is not None
    sizes = {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim}
    sizes |= {"v": sizes["k"], "gate": spec.mlp_width, "up": spec.mlp_width}

    def divide(tensors: dict[str, torch.Tensor]) -> None:
        for layer, (name, parts) in itertools.product(range(len(spec.layers)), whole.items()):
            place = f"model.layers.{layer}.{name}.weight"
            rows = tensors.pop(place).split([sizes[part] for part in parts])
            for part, own in zip(parts, rows, strict=True):
                tensors[place.replace(name.split(".")[1], f"{part}_proj")] = own.contiguous()

    def join(tensors: dict[str, torch.Tensor]) -> None:
        for layer, (name, parts) in itertools.product(range(len(spec.layers)), whole.items()):
            place = f"model.layers.{layer}.{name}.weight"
            own = [place.replace(name.split(".")[1], f"{part}_proj") for part in parts]
            tensors[place] = torch.cat([tensors.pop(each) for each in own])

    rewrite(source, divide)
    folder = quantise(source, tmp_path / "q", *STORED[stored])
    rewrite(folder / "plain", join)
    check_tokens(folder)


@pytest.mark.parametrize("stored", ["exl2", "exl3"])
def test_exllama_has_a_head_of_its_own_where_the_model_has_a_tied_one(
    checkpoint: Make, tmp_path: Path, stored: str
) -> None:
    source = shutil.copytree(
        checkpoint("llama", **FITTING["llama"], tie_word_embeddings=True), tmp_path / "source"
    )
    assert json.loads((source / "config.json").read_text())["tie_word_embeddings"]

    def copy_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(source, copy_head)
    store, said = STORED[stored]
    endings = ("_proj.weight", "lm_head.weight")
    folder = quantise(source, tmp_path / "q", store, said, endings=endings)
    rewrite(folder / "plain", lambda _: None, tie_word_embeddings=False)
    check_tokens(folder)
