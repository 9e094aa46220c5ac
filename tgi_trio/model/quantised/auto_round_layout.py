"""AutoRound (Cheng and others 2023, arXiv 2309.05516): its weights are in GPTQ's or AWQ's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.quantised.awq_layout import AwqLayout, read_awq_layout
from tgi_trio.model.quantised.gptq_layout import GptqLayout, read_gptq_layout

# Words of a form ("auto_round:auto_gptq", once "auto_round:gptq:exllamav2"), the first that it has:
# what stores zero points as GPTQ did at first, minus one; AWQ; what stores them as they are.
_FORMS: Final = (
    ("gptq", ("auto_gptq", "gptq")),
    ("awq", ("auto_awq", "awq")),
    ("gptq_v2", ("gptqmodel", "exllamav2", "triton", "tritonv2", "auto_round")),
)
_KNOWN: Final = {word for _, words in _FORMS for word in words}


def read_auto_round_layout(where: str, quant_config: Mapping[str, Any]) -> GptqLayout | AwqLayout:
    """Return the layout from AutoRound's description.

    Raises ModelLoadError for other forms, and as GPTQ's and AWQ's readers do.
    """
    form = str(
        quant_config.get("packing_format") or quant_config.get("backend") or "auto_round:auto_gptq"
    )
    words, numbers = (
        set(form.replace("autoround", "auto_round").split(":")),
        quant_config.get("data_type"),
    )
    if words <= _KNOWN and numbers in (None, "int"):
        described = {
            "bits": quant_config.get("bits", 4),
            "group_size": quant_config.get("group_size", 128),
        }
        means = next(means for means, known in _FORMS if words.intersection(known))
        if means == "awq":
            return read_awq_layout(where, described)
        mixed = {"checkpoint_format": means, "dynamic": quant_config.get("extra_config")}
        return read_gptq_layout(where, described | mixed)
    raise ModelLoadError(
        f"{where} says that AutoRound's weights are of type {numbers or 'int'!r} in the form "
        f"{form!r}; read are those of type 'int' in the forms auto_round, auto_round:auto_gptq and "
        "auto_round:auto_awq."
    )
