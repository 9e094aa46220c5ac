"""How an adapter changes its base's tensors: the sums, for merging.

LoRA (Hu et al. 2021): W + s B A with s = alpha / r; with rsLoRA, s = alpha / sqrt(r). DoRA (Liu et
al. 2024): m (W + s B A) / |W + s B A|, where |.| is the norm of each output's weights. The tensors
are those of `model/adapters/tensor_kinds.py`. All sums are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG, AdapterConfig
from tgi_trio.model.adapters.tensor_kinds import (
    WRITTEN_WHOLE,
    TensorKind,
    find_kinds,
    is_repeated,
)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter, loaded when it is needed."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Floats]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one module's weight, or of its bias."""

    module: str  # the adapter's name for it: "model.layers.0.self_attn.q_proj"
    tensor: str  # "weight" or "bias"
    parts: Mapping[TensorKind, AdapterTensor]
    scale: float = 0.0  # s
    rows: Sequence[int] = ()  # the tokens of ROWS

    @property
    def name(self) -> str:
        """The tensor's name in the base."""
        return f"{self.module}.{self.tensor}"

    @property
    def whole(self) -> AdapterTensor | None:
        """The tensor that replaces the base's, if any."""
        return self.parts.get(TensorKind.WEIGHT if self.tensor == "weight" else TensorKind.BIAS)

    @property
    def adds(self) -> bool:
        """Whether there are other parts than a whole tensor."""
        return len(self.parts) > (self.whole is not None)

    def shape(self, base: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result; raises ModelLoadError if the two tensors do not fit."""
        whole = self.whole
        if whole is None:
            return base
        if len(whole.shape) != len(base) or whole.shape[1:] != base[1:]:
            raise self._misfit(base, whole.shape)
        return whole.shape

    def apply(self, base: Floats, transposed: bool) -> Floats:
        """Return the changed tensor of the base.

        `transposed`: the base stores matrices of linears as [in, out]. Raises ModelLoadError if the
        adapter's tensors do not fit the base's.
        """
        parts = self.parts
        self.shape(base.shape)
        total = base if self.whole is None else self.whole.load()
        if TensorKind.ROWS in parts:  # PEFT adds A and B of a head to those
            total = self._put_rows(total, parts[TensorKind.ROWS].load())
        if TensorKind.ADDED_BIAS in parts:
            total = self._add(total, np.float32(self.scale) * parts[TensorKind.ADDED_BIAS].load())
        inputs = 1  # axis of a linear's inputs, over which DoRA's norms are computed
        if TensorKind.A in parts:
            delta = self._product(parts[TensorKind.A], parts[TensorKind.B])
            square = total.shape == delta.shape
            if total.shape == delta.shape[::-1] and (transposed or not square):
                delta, inputs = delta.T, 0
            total = self._add(total, delta)
        if TensorKind.EMBEDDING_A in parts:
            delta = self._product(parts[TensorKind.EMBEDDING_A], parts[TensorKind.EMBEDDING_B])
            total, inputs = self._add(total, delta.T), 0
        if TensorKind.MAGNITUDE in parts:
            total = self._rescale(total, parts[TensorKind.MAGNITUDE].load().reshape(-1), inputs)
        return total

    def _product(self, a: AdapterTensor, b: AdapterTensor) -> Floats:
        return np.float32(self.scale) * (b.load() @ a.load())

    def _add(self, base: Floats, added: Floats) -> Floats:
        if base.shape != added.shape:
            raise self._misfit(base.shape, added.shape)
        return base + added

    def _rescale(self, total: Floats, magnitude: Floats, axis: int) -> Floats:
        norms = np.linalg.norm(total, axis=axis)
        if norms.shape != magnitude.shape:
            raise self._misfit(total.shape, magnitude.shape)
        factors: Floats = magnitude / norms
        return total * np.expand_dims(factors, axis)

    def _put_rows(self, total: Floats, values: Floats) -> Floats:
        if values.shape != (len(self.rows), *total.shape[1:]) or max(self.rows) >= len(total):
            raise self._misfit(total.shape, values.shape)
        total = total.copy()
        total[list(self.rows)] = values
        return total

    def _misfit(self, base: Sequence[int], found: Sequence[int]) -> ModelLoadError:
        return ModelLoadError(
            f"{self.name} of the base is {list(base)}, what the adapter has for it {list(found)}: "
            "it is made for another base"
        )


def find_changes(config: AdapterConfig, tensors: Iterator[AdapterTensor]) -> list[Change]:
    """Return the changes by an adapter's tensors, at most one for each tensor of the base.

    Raises ModelLoadError for tensors that its configuration does not announce, for announced
    tensors that are missing, and for matrices that do not fit each other.
    """
    modules: dict[str, dict[TensorKind, AdapterTensor]] = {}
    named = {tensor.name: tensor for tensor in tensors}
    for tensor in named.values():
        if is_repeated(tensor.name, named):
            continue
        kind, module = _classify(config, tensor)
        if kind in modules.setdefault(module, {}):
            raise ModelLoadError(f"{config.folder} holds {tensor.name} twice, under two names")
        modules[module][kind] = tensor
    if not modules:
        raise ModelLoadError(f"{config.folder} holds an adapter without tensors")
    for saved in config.saved_modules:
        if not any(_is_within(module, saved) for module in modules):
            raise ModelLoadError(
                f"modules_to_save of {config.folder / CONFIG} names {saved}, and the adapter has "
                "no tensor of it"
            )
    return [
        change for module, parts in modules.items() for change in _changes(config, module, parts)
    ]


def _classify(config: AdapterConfig, tensor: AdapterTensor) -> tuple[TensorKind, str]:
    """Return the kind of a tensor, and its module."""
    for kind, module in find_kinds(tensor.name):
        if _is_announced(config, kind, module):
            return kind, module
    raise ModelLoadError(explain_unmerged(config, f"the tensor {tensor.name!r}"))


def _is_announced(config: AdapterConfig, kind: TensorKind, module: str) -> bool:
    """Return whether the configuration announces tensors of this kind for the module."""
    values = config.values
    match kind:
        case TensorKind.MAGNITUDE:
            return bool(values.get("use_dora"))
        case TensorKind.ADDED_BIAS:
            return bool(values.get("lora_bias"))
        case TensorKind.ROWS:
            return bool(values.get("trainable_token_indices"))
        case TensorKind.WEIGHT:
            saved = (*WRITTEN_WHOLE, *config.saved_modules)
            return any(_is_within(module, each) for each in saved)
        case TensorKind.BIAS:
            saved = tuple(config.saved_modules)
            return values.get("bias", "none") != "none" or any(
                _is_within(module, each) for each in saved
            )
        case _:
            return True


def _is_within(module: str, name: str) -> bool:
    """Return whether `name`, components of a path, is the module or one that contains it."""
    return f".{name}." in f".{module}."


def _changes(
    config: AdapterConfig, module: str, parts: Mapping[TensorKind, AdapterTensor]
) -> Iterator[Change]:
    """Yield the changes of a module's weight and of its bias."""
    own = dict(parts)
    bias: dict[TensorKind, AdapterTensor] = {
        kind: own.pop(kind) for kind in (TensorKind.BIAS, TensorKind.ADDED_BIAS) if kind in own
    }
    paired, values = False, config.values
    for a, b in ((TensorKind.A, TensorKind.B), (TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B)):
        if (a in own) != (b in own):
            raise ModelLoadError(f"{config.folder} holds only one of the two matrices of {module}")
        if a in own:
            paired = True
            _check_pair(config, module, own[a].shape, own[b].shape)
    for flag, kind, there in (
        ("use_dora", TensorKind.MAGNITUDE, own),
        ("lora_bias", TensorKind.ADDED_BIAS, bias),
    ):
        if (kind in there) != (paired and bool(values.get(flag))):
            raise ModelLoadError(
                f"{flag} of {config.folder / CONFIG} is {values.get(flag)}, and of {module} the "
                f"adapter has {', '.join(sorted(part.name for part in parts.values()))}"
            )
    scale = config.scale(module) if paired else 0.0
    if own:
        rows = config.token_indices(module) if TensorKind.ROWS in own else ()
        yield Change(module, "weight", own, scale, rows)
    if bias:
        yield Change(module, "bias", bias, scale)


def _check_pair(config: AdapterConfig, module: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rank = config.rank(module)
    if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
        raise ModelLoadError(
            f"the adapter's matrices of {module} are {list(a)} and {list(b)}, which does not fit "
            f"the rank {rank} of {CONFIG}"
        )


def explain_unmerged(config: AdapterConfig, what: str) -> str:
    """Return why an adapter cannot be merged."""
    return (
        f"{config.folder} cannot be merged because of {what}, which is not known here. "
        f"{config.advise_peft()}"
    )
