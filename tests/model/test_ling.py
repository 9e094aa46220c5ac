"""What Ling 3's files say, by the names of either class that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.mixers import DeltaRule

SIZES: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4},
}
OTHER_NAMES = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
SAID: dict[str, Any] = {
    **{"num_experts": 16, "num_experts_per_token": 3, "num_shared_experts": 2},
    **{"num_expert_group": 4, "topk_group": 2, "moe_renormalize": False},
    **{"model_max_length": 300, "linear_head_dim": 24, "linear_conv_kernel_dim": 3},
}


def spec_of(folder: Path, **said: Any) -> DecoderSpec | None:
    write_json(folder, SIZES | said)
    return decoder_spec(read_config(folder))


def test_numbers_have_two_names(tmp_path: Path) -> None:
    older = {OTHER_NAMES.get(name, name): value for name, value in SAID.items()}
    found = spec_of(tmp_path / "newer", **SAID)
    assert found is not None and found == spec_of(tmp_path / "older", **older)
    assert read_config(tmp_path / "newer").max_positions == 300
    mixer, experts = found.layers[0].mixer, found.layers[5].experts
    assert isinstance(mixer, DeltaRule) and (mixer.key_dim, mixer.taps) == (24, 3)
    assert experts is not None and (experts.count, experts.per_token, experts.groups) == (16, 3, 4)
    assert [layer.attends for layer in found.layers] == [False] * 5 + [True]


@pytest.mark.parametrize(("safe", "bound"), [(True, -5.0), (False, 0.0)])
def test_decays_have_a_bound_if_their_gate_is_safe(
    tmp_path: Path, safe: bool, bound: float
) -> None:
    found = spec_of(tmp_path, kda_safe_gate=safe)
    assert found is not None
    mixer = found.layers[0].mixer
    assert isinstance(mixer, DeltaRule) and mixer.least_decay == bound


def test_compressed_queries_are_none_of_ours(tmp_path: Path) -> None:
    assert spec_of(tmp_path, q_lora_rank=16) is None
