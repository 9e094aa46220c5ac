"""What torchao and Quark say of matrices, and which of their forms are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.quantised_formats import CONFIG, FORMATS, Changes, Q, changes_of, make
from tests.model.support import Asked, make_folder
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.families.own_head import WARNING


def check(folder: Path, **serving: Any) -> list[str]:
    return check_model(read_config(folder), Asked(**serving))


def test_a_tied_model_may_hold_its_quantised_embedding_as_the_head_as_well(tmp_path: Path) -> None:
    tied = CONFIG | {"tie_word_embeddings": True, "quantization_config": FORMATS["torchao int8"][1]}
    rows, width = CONFIG["vocab_size"], CONFIG["hidden_size"]
    layers = changes_of(tmp_path, "torchao int8")
    embedding, head = (
        FORMATS["torchao int8"][0](name, rows, width) for name in ("model.embed_tokens", "lm_head")
    )
    gone: Changes = {"model.embed_tokens.weight": None, "lm_head.weight": None}
    make_folder(tmp_path, tied, layers | gone | embedding | head)
    assert check(tmp_path) == []
    plain: Changes = {"model.embed_tokens.weight": ("F16", (rows, width)), "lm_head.weight": None}
    make_folder(tmp_path, tied, layers | plain | head)
    assert check(tmp_path) == [WARNING]  # the head is read, as it is


def test_forms_of_torchao_that_are_not_read(tmp_path: Path) -> None:
    make(tmp_path, "torchao halves", {f"{Q}._weight_act_pre_scale": ("BF16", (64,))})
    with pytest.raises(
        ModelLoadError, match=r"q_proj\.weight' is stored in AWQ's or SmoothQuant's"
    ):
        check(tmp_path)
    for dtype, form in (("F8_E8M0", "MX"), ("F8_E4M3", "NVFP4")):
        make(tmp_path, "torchao int8", {f"{Q}._weight_scale": (dtype, (64, 4))})
        with pytest.raises(ModelLoadError, match=f"is stored in {form}, which is read as"):
            check(tmp_path)
    make(tmp_path, "torchao halves", {f"{Q}._weight_scale": ("BF16", (3, 64))})
    with pytest.raises(ModelLoadError, match="of 64 inputs has 3 groups of them"):
        check(tmp_path)
    inner = {"default": {"_data": {"fqn_to_config": {"a": {"int4_tile_packed_ntile": 16}}}}}
    make(tmp_path, "torchao tiles", said={"quant_type": inner})
    with pytest.raises(ModelLoadError, match="in the order of AMD's kernels"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"global_quant_config": {"weight": {"dtype": "fp6_e2m3"}}}, "of the types fp6_e2m3"),
        ({"layer_quant_config": {"*": {"weight": {"dtype": "int4"}}}}, "types int4, uint4"),
        ({"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}] * 2}}, "quantised in 2 steps"),
        ({"export": {"weight_format": "fake_quantized"}}, "weights are fake_quantized in the"),
        ({"export": {"pack_method": "tiled"}}, "in the order 'tiled'"),
    ],
)
def test_forms_of_quark_that_are_not_read(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    make(tmp_path, "quark", said=said)
    with pytest.raises(ModelLoadError, match=message):
        check(tmp_path)


def test_inputs_that_quark_has_rotated_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "quark", {f"{Q}.input_rotation": ("I8", (64, 64))})
    with pytest.raises(ModelLoadError, match=r"input_rotation' .* in the format Quark, which noth"):
        check(tmp_path)
