"""A model of transformers is served with the tokens of its own `generate`, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.models_support import generated, load, prompts, run, sequence, tables
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.torch_backend.fallback import probe
from tgi_trio.shard.torch_backend.fallback.autoregression import find_other_writing

PROMPT = prompts(1)[0][:9]
NEW = 8
pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[..., Path]
SEES = "its tokens see those that follow them"
FEEDS = "does not feed it the tokens so far"


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def written(model: Any) -> tuple[list[int], torch.Tensor, float]:
    """Return the tokens of transformers' own `generate`, their logits [NEW, vocabulary], and how
    far off those of plain passes are, in parts of the largest."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    ids = torch.tensor([list(PROMPT)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids))
    far = 0.0
    for i, theirs in enumerate(out.logits):
        known = out.sequences[:, : len(PROMPT) + i]
        plain = model(input_ids=known, use_cache=False, return_dict=True).logits[0, -1]
        far = max(far, float((plain - theirs[0]).abs().max() / theirs.abs().max()))
    return out.sequences[0, len(PROMPT) :].tolist(), torch.cat(out.logits), far


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("bert", {}, SEES),
        ("electra", {}, SEES),
        ("xlnet", {}, SEES),
        ("xlm", {}, SEES),
        ("xlm", {"causal": True}, FEEDS),
    ],
)
def test_other_tokens_than_its_own_are_not_served(
    checkpoint: Make, family: str, changes: dict[str, Any], why: str
) -> None:
    folder = checkpoint(family, **changes)
    assert written(model_of(folder))[2] > 2e-3
    with pytest.raises(ModelLoadError, match=f"{family!r} cannot be served .*: .*{why}") as caught:
        load(folder)
    advised = "is_decoder: true" in str(caught.value)
    assert advised == (family in ("bert", "electra"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("bert", {"is_decoder": True}), ("ctrl", {}), ("codegen", {})],
)
def test_its_own_tokens_are_served(checkpoint: Make, family: str, changes: dict[str, Any]) -> None:
    folder = checkpoint(family, **changes)
    tokens, logits, far = written(model_of(folder))
    assert far < 1e-4
    runner, recorder = load(folder)
    blocks = tables([PROMPT], new=NEW)
    row = sequence(0, PROMPT, blocks[0], new=NEW, ignore_eos=True)
    run(runner, [row])
    assert generated(row) == tokens
    assert torch.allclose(recorder.logits(0), logits, atol=1e-3 * float(logits.abs().max()))


def test_without_a_twin_the_model_itself_is_asked(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "build_twin", lambda model: None)
    with pytest.raises(ModelLoadError, match=SEES):
        load(checkpoint("electra"), dtype="bfloat16")
    assert load(checkpoint("ctrl"), dtype="bfloat16")[0].info.backend == "transformers, recompute"


def test_a_model_whose_generate_fails_is_not_accused_and_keeps_its_own_settings(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(checkpoint("ctrl"))
    settings = model.generation_config
    assert find_other_writing(model) is None
    nothing: dict[str, Any] = {}
    monkeypatch.setattr(type(model), "generate", lambda *given, **named: nothing["at all"])
    assert find_other_writing(model) is None
    assert model.generation_config is settings
