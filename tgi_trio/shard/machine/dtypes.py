"""The dtype in which a model is computed."""

from __future__ import annotations

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.config import ModelConfig
from tgi_trio.settings.records import DTYPES


def compute_dtype(wanted: str | None, config: ModelConfig, *, on_cpu: bool) -> str:
    """Return the dtype to compute in. Raises ConfigurationError for one that is not supported.

    `wanted` None or "auto": the checkpoint's own, float32 if that is float64.
    """
    own = wanted in (None, "auto")
    name = config.dtype or "float32" if own else str(wanted)
    if own and (name == "float64" or (name == "float16" and on_cpu)):
        name = "float32"  # most CPUs have no float16 arithmetic, and nothing here has float64's
    if name not in DTYPES:
        raise ConfigurationError(
            f"dtype {name!r} cannot be computed in; allowed are {', '.join(DTYPES)} (--dtype)."
        )
    return name
