"""Ranks divide models that run through transformers, and say what it says of the whole."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.ranks.transformers_support import (
    DIVIDED,
    HERE,
    PLAIN,
    build_in_turns,
    change_plan,
    check_ranks,
    models,
    numbers,
    refused,
)
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    advance,
    generated,
    load,
    prompts,
    run,
    sequence,
    sequences,
)
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.split import Portion
from tgi_trio.shard.torch_backend.fallback import reading_parts
from tgi_trio.shard.torch_backend.fallback.division import read_division
from tgi_trio.shard.torch_backend.fallback.twin import build_twin

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    build_in_turns(monkeypatch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", HERE)
def test_two_ranks_say_what_transformers_says_and_hold_half_each(
    checkpoint: Checkpoint, family: str
) -> None:
    folder = checkpoint(family, **DIVIDED[family])
    golden = Golden(folder)
    held = check_ranks(folder, golden=golden)
    assert [type(model) for model in held] == [type(golden.model)] * 2
    names = dict(golden.model.named_parameters()).keys()
    assert all(dict(model.named_parameters()).keys() == names for model in held)
    # Norms and routers are whole everywhere.
    assert max(map(numbers, held)) < 0.55 * numbers(golden.model)
    for model in held:  # and no part is a view of something larger
        storages = {p.data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        assert sum(storages.values()) == 4 * numbers(model)


def test_four_ranks_have_a_head_for_keys_each(checkpoint: Checkpoint) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    held = check_ranks(checkpoint(PLAIN, vocab_size=515, **sizes), 4)
    assert [model.lm_head.weight.shape[0] for model in held] == [129, 129, 129, 128]


def test_a_tied_head_is_the_embedding_on_each_rank(checkpoint: Checkpoint) -> None:
    held = check_ranks(checkpoint(PLAIN, tie_word_embeddings=True))
    embeddings = [model.get_input_embeddings().weight for model in held]
    assert all(model.lm_head.weight is own for model, own in zip(held, embeddings, strict=True))
    assert [len(own) for own in embeddings] == [256, 256]


def test_a_head_that_is_tied_to_a_whole_embedding_stays_whole(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_plan(monkeypatch, embed_tokens="replicate")
    held = check_ranks(checkpoint(PLAIN, tie_word_embeddings=True))
    assert [len(model.lm_head.weight) for model in held] == [512, 512]


def test_text_of_a_model_that_sees_images(tmp_path: Path, checkpoint: Checkpoint) -> None:
    text = json.loads((checkpoint("aria_text", **DIVIDED["aria_text"]) / "config.json").read_text())
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    tower |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    folder = checkpoint("aria", text_config=text, vision_config=tower, image_token_id=9)
    assert max(map(numbers, check_ranks(folder))) < 0.65 * numbers(Golden(folder).model)


CONFIGURATION = """
from transformers import LlamaConfig

class LagoonConfig(LlamaConfig):
    model_type = "lagoon"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_lagoon import LagoonConfig

class LagoonForCausalLM(LlamaForCausalLM):
    config_class = LagoonConfig
"""


def test_code_that_comes_with_a_model_may_have_a_plan(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = Path(shutil.copytree(plain := checkpoint("llama"), tmp_path / "lagoon"))
    (folder / "configuration_lagoon.py").write_text(CONFIGURATION)
    (folder / "modeling_lagoon.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "lagoon", "architectures": ["LagoonForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_lagoon.LagoonConfig",
        "AutoModelForCausalLM": "modeling_lagoon.LagoonForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    golden = Golden(plain)
    held = check_ranks(folder, golden=golden, trust_remote_code=True)
    assert {type(model).__name__ for model in held} == {"LagoonForCausalLM"}
    assert max(map(numbers, held)) < 0.55 * numbers(golden.model)


def test_parts_are_computed_in_the_dtype_that_is_asked_for(checkpoint: Checkpoint) -> None:
    folder, recorder = checkpoint(PLAIN), GreedyRecorder()
    rows = sequences(prompts(8)[5:], shuffle=3, new=4)
    with ranks_of(folder, 2, recorder, dtype="bfloat16") as ranks:
        ranks.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        run(ranks, rows, chunk=20, joins=2)
        dtypes = {p.dtype for model in models(ranks) for p in model.parameters()}
    assert dtypes == {torch.bfloat16}
    golden = Golden(folder)
    for row in rows:
        exact = golden.logits(row.token_ids[: row.prompt_length].tolist(), generated(row))
        alike = torch.cosine_similarity(recorder.logits(row.id), exact, dim=-1)
        assert alike.min() > 0.99


def test_prompt_logprobs_of_two_ranks(checkpoint: Checkpoint) -> None:
    folder, prompt = checkpoint(PLAIN), prompts(8)[5]
    with ranks_of(folder, 2, GreedyRecorder()) as ranks:
        ranks.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        row = sequence(0, prompt, range(1, 5), new=2, prompt_logprobs=True)
        found = [*advance(ranks, [row], [20])[0].prompt_logprobs]
        found += advance(ranks, [row], [len(prompt) - 20])[0].prompt_logprobs
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx(Golden(folder).prompt_logprobs(prompt), abs=1e-4)


def test_a_rank_keeps_the_keys_and_values_of_its_heads(checkpoint: Checkpoint) -> None:
    folder = checkpoint(PLAIN)
    with ranks_of(folder, 2, GreedyRecorder()) as ranks:
        half = ranks.info.kv_bytes_per_token
    assert load(folder)[0].info.kv_bytes_per_token == 2 * half


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "size"), [(PLAIN, 8), ("olmoe", 2)])
def test_the_twin_of_a_large_model_is_divided_as_it_is(
    monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # of billions of parameters, by its type's defaults
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    twin: Any = build_twin(model, size)
    assert numbers(twin) < 20e6 < numbers(model) / 300
    for rank in range(size):
        of_model, of_twin = (read_division(each, Portion(rank, size)) for each in (model, twin))
        share, whole = of_twin.numbers(twin), numbers(twin)
        assert of_model.numbers(model) < 1.1 * numbers(model) / size
        assert share < 1.5 * whole / size
        cut = {name for name in of_model.parts if name in dict(twin.named_parameters())}
        assert cut == of_twin.parts.keys()


class Counted:
    """A tensor in a file; what is read of it is counted."""

    def __init__(self, stored: Any, read: list[int]) -> None:
        self._stored, self._read = stored, read

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def __getitem__(self, key: Any) -> torch.Tensor:
        found: torch.Tensor = self._stored[key]
        self._read.append(found.numel())
        return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "experts"),
    # As transformers writes them, and in one tensor, as Aria's are.
    [("beam", "experts.3.down_proj.weight"), ("aria_text", "experts.fc2.weight"), (PLAIN, "")],
)
def test_a_rank_reads_what_it_holds(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str, experts: str
) -> None:
    folder = checkpoint(family, **DIVIDED[family])
    assert any(name.endswith(experts) for name in load_file(folder / "model.safetensors"))
    read: list[int] = []
    stored_tensors = reading_parts._stored_tensors

    def counted(*args: Any) -> Iterator[tuple[str, Any]]:
        return ((name, Counted(stored, read)) for name, stored in stored_tensors(*args))

    monkeypatch.setattr(reading_parts, "_stored_tensors", counted)
    with ranks_of(folder, 2, GreedyRecorder()) as ranks:
        held = models(ranks)
    tied = [model.lm_head.weight is model.get_input_embeddings().weight for model in held]
    assert tied == [False, False]
    states = [tensor for model in held for tensor in model.state_dict().values()]
    assert sum(read) == sum(tensor.numel() for tensor in states)


# What is imported and tried first is no part of what the second model takes.
HOLD = """
import gc, sys, torch
from pathlib import Path
from types import SimpleNamespace
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.fallback.loading import load_model

def load(folder):
    ranks = SimpleNamespace(rank=1, size=2)
    return load_model(read_config(Path(folder)), torch.float32, torch.device("cpu"), False, ranks)

def held():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

load(sys.argv[1])
before = held()
model = load(sys.argv[2])
print(held() - before, sum(p.nbytes for p in model.parameters()))
"""
SLACK = 12 << 20  # of Python and of the allocator


def test_a_rank_has_no_more_in_memory_than_its_part(checkpoint: Checkpoint) -> None:
    """Pages of the file are the kernel's again: nothing of it stays mapped."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    large = checkpoint(PLAIN, vocab_size=4096, **sizes)
    done = subprocess.run(
        [sys.executable, "-c", HOLD, str(checkpoint(PLAIN)), str(large)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    held, part = map(int, done.stdout.split())
    assert part < 0.51 * (large / "model.safetensors").stat().st_size
    assert held < part + SLACK


def test_experts_that_lie_in_several_files_are_stacked_in_their_order(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("olmoe", **DIVIDED["olmoe"]), tmp_path / "apart"))
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = {f"part{n}.safetensors": sorted(tensors)[n::3] for n in range(3)}
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    index = {name: file for file, held in names.items() for name in held}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    check_ranks(folder)


def test_a_missing_tensor_is_named_by_ranks_as_well(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint(PLAIN), tmp_path / "less"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name or "c_proj" in name)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, r"Tensor 'model\.layers\.\d\.mlp\.down_proj\.weight' is missing")


def test_a_tensor_that_is_left_over_is_named_by_ranks_as_well(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint(PLAIN), tmp_path / "more"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.surprise.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "surprise")
