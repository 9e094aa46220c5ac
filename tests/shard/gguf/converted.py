"""What llama.cpp's converter makes of newer models: their metadata, and their tensors.

Names are those of the `gguf` package; what else is changed is written in `converted_attention.py`
and `converted_states.py` as the converter's source has it, architecture by architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.shard.gguf import converted_attention as attention
from tests.shard.gguf import converted_deepseek4 as deepseek4
from tests.shard.gguf import converted_glm5_next as glm5_next
from tests.shard.gguf import converted_kin as kin
from tests.shard.gguf import converted_states as states
from tests.shard.gguf import converted_windows as windows
from tests.shard.gguf.conversion import Array, Config, Modify, Tensors, common, side_by_side
from tests.shard.gguf.files import gguf

ENDINGS = (".weight", ".bias", ".scale")
OWN = ("blk.", "token", "output", "per_layer", "altup", "rope")  # how llama.cpp's names begin
# Architectures that the package does not name yet -> one whose tensors are called the same.
NAMED_AS = {
    "deepseek32": "glm-dsa",
    "hy_v3": "dots1",
    "cohere2moe": "dots1",
    "mellum": "dots1",
    "laguna": "step35",
    "granite_swa": "granite",
    "muse-glimmer": "gemma3",
    "minimax-m3": "dots1",
    "glm5-next": "kimi-linear",
    "deepseek4": "dots1",
}


def convert(
    case: str, config: Config, stored: Mapping[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return a file's metadata and tensors, of a checkpoint's config and tensors.

    `case`: an architecture, and what tells cases of one apart.
    """
    name = case.partition(" ")[0]
    describe, modify = CASES.get(case) or MODELS[name]
    said = describe(config)
    (arch,) = (
        key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == NAMED_AS.get(name, name)
    )
    names = gguf.get_tensor_name_map(arch, said["block_count"])
    found: dict[str, Array] = {}
    for own, array in _stacked(stored):
        for renamed, content in modify(own, array, config):
            theirs = names.get_name(renamed, try_suffixes=ENDINGS) or renamed
            assert theirs.startswith(OWN), own
            found[theirs] = content
    extra = EXTRA.get(case, EXTRA.get(name))
    for renamed, content in extra(stored, config) if extra else ():
        found[names.get_name(renamed, try_suffixes=ENDINGS) or renamed] = content
    whole = {f"{name}.{key}": value for key, value in said.items()}
    if name == "apertus":
        whole |= attention.xielu(stored, config["num_hidden_layers"])
    return whole, found


def _stacked(stored: Mapping[str, Array]) -> Tensors:
    """Yield tensors, those of experts as one for all of a layer."""
    experts: dict[str, dict[int, Array]] = {}
    for own, array in stored.items():
        number = re.search(r"\.experts\.(\d+)\.", own)
        if number is None:
            yield own, array
        else:
            whole = own.replace(number[0], ".experts.")
            experts.setdefault(whole, {})[int(number[1])] = array
    for whole, parts in experts.items():
        yield whole, np.stack([parts[i] for i in range(len(parts))])


Extra = Callable[[Mapping[str, Array], Config], Tensors]
EXTRA: dict[str, Extra] = {
    "gemma3n": attention.extra_gemma3n,
    "gemma4": attention.extra_gemma4,
    "step35": windows.extra_step,
    "exaone": kin.extra_exaone,
    "bailingmoe2": windows.joined_attention,
    "chatglm joined": windows.joined_attention,
}
MODELS: dict[str, tuple[Callable[[Config], dict[str, Any]], Modify]] = {
    "qwen3next": (states.describe_qwen3next, states.modify_qwen3next),
    "qwen35": (states.describe_qwen35, states.modify_drafting_qwen35),
    "qwen35moe": (states.describe_qwen35, states.modify_drafting_qwen35),
    "kimi-linear": (states.describe_kimi, states.modify_kimi),
    "gemma3n": (attention.describe_gemma3n, attention.modify_gemma3n),
    "gemma4": (attention.describe_gemma4, attention.modify_gemma4),
    "falcon-h1": (states.describe_falcon_h1, states.modify_falcon_h1),
    "nemotron_h": (states.describe_nemotron_h, states.modify_nemotron_h),
    "nemotron_h_moe": (states.describe_nemotron_h, states.modify_nemotron_h),
    "jamba": (states.describe_jamba, states.modify_mamba1),
    "mamba": (states.describe_mamba, states.modify_mamba1),
    "mamba2": (states.describe_mamba2, states.modify_mamba2),
    "mistral3": (attention.describe_mistral3, side_by_side),
    "mistral4": (attention.describe_mistral4, attention.modify_mistral4),
    "llama4": (attention.describe_llama4, attention.modify_llama4),
    "apertus": (common, attention.modify_apertus),
    "mimo2": (attention.describe_mimo2, attention.modify_mimo2),
    "deepseek32": (attention.describe_deepseek32, attention.modify_deepseek32),
    "deepseek4": (deepseek4.describe, deepseek4.modify),
    "glm5-next": (glm5_next.describe, glm5_next.modify),
    "glm-dsa": (attention.describe_glm_dsa, attention.modify_deepseek32),
    "glm4": (attention.describe_glm4v, attention.modify_glm4v),
    "hy_v3": (attention.describe_hy_v3, attention.modify_plain),
    "granitehybrid": (states.describe_bamba, states.modify_bamba),
    "exaone-moe": (windows.describe_exaone_moe, windows.modify_biased),
    "afmoe": (windows.describe_afmoe, windows.modify_biased),
    "cohere2moe": (windows.describe_cohere2moe, attention.modify_plain),
    "mellum": (windows.describe_mellum, attention.modify_plain),
    "laguna": (windows.describe_laguna, windows.modify_biased),
    "step35": (windows.describe_step, windows.modify_step),
    "minimax-m3": (windows.describe_minimax_m3, windows.modify_minimax_m3),
    "granite_swa": (windows.describe_granite_swa, windows.modify_granite_swa),
    "granitemoe": (windows.describe_granitemoe, windows.modify_granitemoe),
    "bailingmoe": (windows.describe_bailingmoe, windows.modify_granitemoe),
    "bailingmoe2": (windows.describe_bailingmoe2, windows.modify_bailingmoe2),
    "muse-glimmer": (kin.describe_muse, kin.modify_muse),
    "jais2": (kin.describe_jais2, attention.modify_plain),
    "chatglm": (kin.describe_chatglm, attention.modify_plain),
    "minicpm3": (kin.describe_minicpm3, attention.modify_plain),
    "internlm2": (common, side_by_side),
    "xverse": (common, side_by_side),
    "exaone": (common, attention.modify_plain),
    "pangu-embedded": (common, attention.modify_plain),
    "minicpm": (kin.describe_minicpm, side_by_side),
    "orion": (kin.describe_orion, attention.modify_plain),
    "maincoder": (common, kin.modify_maincoder),
}
# Cases that are described otherwise than their architecture.
CASES: dict[str, tuple[Callable[[Config], dict[str, Any]], Modify]] = {
    "deepseek2 without experts": (kin.describe_youtu, kin.modify_youtu),
    "chatglm joined": (kin.describe_chatglm, windows.modify_bailingmoe2),
}
