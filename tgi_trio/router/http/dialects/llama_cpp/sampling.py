"""How llama.cpp draws tokens: its defaults, and the list of samplers that apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tgi_trio.errors import ValidationError, name_param
from tgi_trio.router.http.dialects.llama_cpp.schema import InfillRequest

_DEFAULTS: Final[Mapping[str, float]] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0}
)
# Names in `samplers`, and the letters of its short form. Those of None are off in every request
# that is served.
_FIELDS: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "penalties": "penalties",
        "dry": None,
        "top_n_sigma": None,
        "top_k": "top_k",
        "typ_p": "typical_p",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc": None,
        "temperature": "temperature",
        "infill": "infill",
    }
)
_LETTERS: Final = MappingProxyType(
    {
        **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p"},
        **{"p": "top_p", "m": "min_p", "x": "xtc", "t": "temperature", "i": "infill"},
    }
)
_TRUNCATIONS: Final = frozenset({"top_k", "typ_p", "top_p", "min_p"})
_MOST_CANDIDATES: Final = 512  # that the sampler `infill` judges


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn, in the validator's names."""

    parameters: Mapping[str, Any]
    greedy: bool  # the likeliest of what is left is taken
    judged: bool  # by the sampler `infill`


def read_drawing(infill_request: InfillRequest) -> Drawing:
    """Return how a request draws its tokens. Raises ValidationError."""
    names = _read_samplers(infill_request.samplers)
    given = {name: getattr(infill_request, name) for name in _DEFAULTS}
    values = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
    if names is None:
        return _draw(values, infill_request, judged=False)
    fields = {_FIELDS[name] for name in names}
    judged = "infill" in fields
    values = {name: value if name in fields else _OFF[name] for name, value in values.items()}
    if judged:
        _check_judged(names, values["top_k"])
    return _draw(values, infill_request if "penalties" in fields else None, judged=judged)


_OFF: Final[Mapping[str, float]] = MappingProxyType(
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
)


def _draw(values: Mapping[str, Any], penalised: InfillRequest | None, *, judged: bool) -> Drawing:
    greedy = values["temperature"] <= 0
    return Drawing(
        {
            **values,
            "temperature": 1.0 if greedy else values["temperature"],
            "top_k": values["top_k"] if values["top_k"] > 0 else None,
            "typical_p": None if values["typical_p"] == 1 else values["typical_p"],
            "frequency_penalty": None if penalised is None else penalised.frequency_penalty,
            "presence_penalty": None if penalised is None else penalised.presence_penalty,
        },
        greedy,
        judged,
    )


def _read_samplers(given: str | list[str] | None) -> list[str] | None:
    """Return the names of the samplers in their order; None: llama.cpp's own choice."""
    if given is None:
        return None
    names = [_LETTERS.get(each, each) for each in given] if isinstance(given, str) else given
    for name in names:
        if name not in _FIELDS:
            known = ", ".join(f"`{each}`" for each in _FIELDS)
            text = f"`samplers` names `{name}`, and has any of {known}"
            raise name_param(ValidationError(text), "samplers")
    return names


def _check_judged(names: list[str], top_k: float) -> None:
    """Raise ValidationError where `infill` cannot judge the best candidates alone."""
    later = _TRUNCATIONS & set(names[names.index("infill") :])
    if later:
        text = "`infill` is the last of the `samplers` that leave tokens out. Given: " + ", ".join(
            f"`{name}`" for name in names
        )
        raise name_param(ValidationError(text), "samplers")
    if not 0 < top_k <= _MOST_CANDIDATES:
        text = (
            f"the sampler `infill` judges the best tokens: `top_k` comes before it in `samplers`, "
            f"and must be > 0 and <= {_MOST_CANDIDATES}. Given: {top_k}"
        )
        raise name_param(ValidationError(text), "top_k")
