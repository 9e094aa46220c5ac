"""`adapter_config.json` of PEFT: the allowed fields, and the scale of an adapter's products.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: W + (alpha / r) B A; with
rsLoRA (Kalajdzievski 2023) the factor is alpha / sqrt(r). Fields are those of peft 0.21's
LoraConfig. Adapters of parameters without a module can only be served beside others;
`find_refused` returns this field, and all that are not in the tables below: none is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import parse_json, read_file

CONFIG: Final = "adapter_config.json"
_LONGEST: Final = 1 << 20  # bytes
_MOST_PATTERNS: Final = 1000
_MOST_REPEATS: Final = 4  # in a pattern; each may multiply the time by a name's length

# Fields that do not concern the sums: tensors' names show the adapted modules.
_HARMLESS: Final = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path corda_config eva_config exclude_modules "
    "fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_alpha "
    "lora_dropout megatron_core modules_to_save peft_version qalora_group_size r rank_pattern "
    "revision runtime_config target_modules target_parameters task_type trainable_token_indices "
    "use_rslora".split()
)
# Fields with the only values allowed.
_ALLOWED: Final[Mapping[str, tuple[object, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", "all", "lora_only"),
    "use_dora": (True, False),
    "lora_bias": (True, False),
    "ensure_weight_tying": (True, False),
    # the others change the base before training: the adapter fits that base alone
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Kinds whose numbers stand beside a prompt, or are chosen by it: no weights of a base say the same.
_OF_PROMPTS: Final = frozenset(
    "ADAPTION_PROMPT CARTRIDGE CPT MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING PROMPT_TUNING "
    "XLORA".split()
)
_RELEASE: Final = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d)")
_UNMERGED: Final = frozenset({"target_parameters"})  # served beside others alone


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter's configuration as read."""

    folder: Path
    values: Mapping[str, Any]

    @property
    def base(self) -> str:
        """The model for which it was made, by its own account; "" if it is not named."""
        name = self.values.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    def find_refused(self, *, merged: bool = False) -> list[str]:
        """Return fields that cannot be served beside others, as `name value`, in the file's order.

        `merged`: the adapter is to be merged into its base, which also allows other changes.
        """
        return [
            f"{name} {value!r:.100}"
            for name, value in self.values.items()
            if not (_is_merged(name, value) if merged else _is_served(name, value))
        ]

    def advise(self) -> str:
        """Return what to do with an adapter that cannot be served beside others."""
        if self.find_refused(merged=True):
            return self.advise_peft()
        return f"Served alone it is merged into its base: --model-id {self.folder}"

    def advise_peft(self) -> str:
        """Return whether PEFT can merge an adapter that this server cannot merge."""
        values = self.values
        kind = str(values.get("peft_type"))  # which may be anything: a list has no hash
        if kind in _OF_PROMPTS or values.get("alora_invocation_tokens"):
            return "What it adds depends on the prompt, so nothing can merge it: it is not served"
        return "Merge it with PEFT (merge_and_unload, then save_pretrained) and serve that folder"

    @property
    def saved_modules(self) -> Sequence[str]:
        """Modules that the adapter contains whole: parts of their paths. Raises ModelLoadError."""
        names = self.values.get("modules_to_save") or []
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ModelLoadError(f"modules_to_save of {self.folder / CONFIG} is no list of names")
        return names

    def is_saved(self, module: str) -> bool:
        """Return whether the adapter contains a module whole; raises ModelLoadError."""
        return any(f".{module}".endswith(f".{name}") for name in self.saved_modules)

    def token_indices(self, module: str) -> Sequence[int]:
        """Return the rows of an embedding or head in the adapter; raises ModelLoadError."""
        found = self.values.get("trainable_token_indices")
        if isinstance(found, dict):
            named = [each for name, each in found.items() if f".{module}".endswith(f".{name}")]
            found = named[0] if named else None
        if not isinstance(found, list) or not found or not all(_is_index(each) for each in found):
            raise ModelLoadError(
                f"trainable_token_indices of {self.folder / CONFIG} has no list of numbers for "
                f"{module}"
            )
        return found

    @property
    def peft_version(self) -> tuple[int, ...]:
        """The release of PEFT that wrote it; () if that is not said."""
        found = _RELEASE.match(str(self.values.get("peft_version")))
        return () if found is None else tuple(int(part) for part in found.groups(default="0"))

    def rank(self, module: str) -> int:
        """Return r of a module, with regard to `rank_pattern`; raises ModelLoadError."""
        found = self._of_pattern("rank_pattern", module, self.values.get("r"))
        if found != int(found):
            raise ModelLoadError(f"{self.folder / CONFIG} gives {module} the rank {found}")
        return int(found)

    def scale(self, module: str) -> float:
        """Return the factor of a module's B A; raises ModelLoadError."""
        alpha = self._of_pattern("alpha_pattern", module, self.values.get("lora_alpha"))
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.values.get("use_rslora") else rank)

    def _of_pattern(self, name: str, module: str, otherwise: Any) -> float:
        """Return the value of the first pattern that matches the module, with PEFT's rules."""
        for pattern, value in self._patterns[name]:
            if pattern.match(module):
                otherwise = value
                break
        number = isinstance(otherwise, int | float) and not isinstance(otherwise, bool)
        if not number or not 0 < otherwise < math.inf:
            raise ModelLoadError(
                f"{self.folder / CONFIG} gives {module} no rank or alpha above 0, but {otherwise!r}"
            )
        return float(otherwise)

    @cached_property
    def _patterns(self) -> Mapping[str, Sequence[tuple[re.Pattern[str], Any]]]:
        """The patterns for modules' names, as in PEFT, with values; raises ModelLoadError."""
        return {name: self._compile(name) for name in ("rank_pattern", "alpha_pattern")}

    def _compile(self, name: str) -> list[tuple[re.Pattern[str], Any]]:
        try:
            patterns = dict(self.values.get(name) or {})
            if len(patterns) > _MOST_PATTERNS:
                raise ValueError(f"it has {len(patterns)} patterns, more than {_MOST_PATTERNS}")
            if slow := next(filter(_may_be_slow, patterns), None):
                raise ValueError(
                    f"{slow!r:.100} repeats a group, or has more than {_MOST_REPEATS} repetitions"
                )
            return [
                (re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in patterns.items()
            ]
        except (re.error, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise ModelLoadError(f"{name} of {self.folder / CONFIG} is damaged: {error}") from error


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read a folder's `adapter_config.json`; raises ModelLoadError unless it is a JSON object."""
    path = folder / CONFIG
    try:
        values = parse_json(read_file(path, _LONGEST))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {tell_reason(error, path)}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return AdapterConfig(folder, values)


def _may_be_slow(pattern: str) -> bool:
    """Return whether the time of matching may exceed a small power of a name's length."""
    repeats = re.findall(r"[*+{]|(?<!\()\?", pattern)
    return len(repeats) > _MOST_REPEATS or re.search(r"\)[*+{]", pattern) is not None


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_merged(name: str, value: Any) -> bool:
    if name in _UNMERGED:
        return not value
    return _is_served(name, value)


def _is_served(name: str, value: Any) -> bool:
    if name in _ALLOWED:
        return value is None or value in _ALLOWED[name]
    return not value or name in _HARMLESS
