"""How a loaded model is served, and why not otherwise, in sentences. No torch in this file."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import model_spec
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.fit.cpu_kernels import find_undivided, find_unsupported
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.t5 import T5Spec
from tgi_trio.model.split import check_split


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves a model, and why it lacks a feature; "": it has the feature."""

    path: str  # its name in docs/models.md
    backend: str  # the shard's name for it
    no_cpu_kernels: str = ""
    no_prefix_cache: str = ""
    no_drafts: str = ""
    no_ranks: str = ""
    device: str = ""  # as torch names it

    def rows(self) -> tuple[str, ...]:
        """Return the rows "name: value", in the order of the fields."""
        might = {
            "CPU kernels": self.no_cpu_kernels,
            "prefix cache": self.no_prefix_cache,
            "drafts": self.no_drafts,
            "ranks": self.no_ranks,
        }
        answers = (f"{name}: {f'no, {why}' if why else 'yes'}" for name, why in might.items())
        return (f"path: {self.path}", f"backend: {self.backend}", *answers)


def describe_serving(
    config: ModelConfig,
    *,
    backend: str,
    device: str,
    dtype: str,
    parts: int,
    prefix_reuse: bool,
    speculates: bool,
    undivided: str = "",
) -> Serving:
    """Return how a model is served that a shard has loaded; most arguments are what it reports.

    `parts`: ranks that each have a portion of every layer. Raises ModelLoadError for a config.json
    whose values make no sense.
    """
    spec = model_spec(config)
    paths = {DecoderSpec: "decoder", T5Spec: "encoder-decoder"}
    return Serving(
        path=backend if spec is None else paths[type(spec)],
        backend=backend,
        no_cpu_kernels=_no_cpu_kernels(spec, backend, device, dtype, parts),
        no_prefix_cache="" if prefix_reuse else _no_prefix_cache(spec),
        no_drafts="" if speculates else _explain_no_drafts(spec),
        no_ranks=undivided or _no_ranks(spec),
        device=device,
    )


def _no_cpu_kernels(
    spec: DecoderSpec | T5Spec | None, backend: str, device: str, dtype: str, parts: int
) -> str:
    if backend.startswith("kernels"):
        return ""
    if device != "cpu":
        return f"it is computed on {device}"
    if isinstance(spec, T5Spec):
        return "it has an encoder"
    if (reason := find_unsupported(spec, dtype)) is not None:
        return reason
    if spec is not None and (reason := find_undivided(spec, parts)) is not None:
        return reason
    return "--cpu-backend asks for torch, or the log says why"


def _no_prefix_cache(spec: DecoderSpec | T5Spec | None) -> str:
    if isinstance(spec, DecoderSpec):
        return "its rotary frequencies depend on the length of a sequence"
    if isinstance(spec, T5Spec):
        return "what its decoder computes depends on the whole prompt"
    return "transformers keeps a cache of its own for each sequence, or an encoder's output"


def _explain_no_drafts(spec: DecoderSpec | T5Spec | None) -> str:
    if isinstance(spec, DecoderSpec):
        return "its backend has no steps with several tokens of a sequence"
    if isinstance(spec, T5Spec):
        return "it has an encoder"
    return "transformers computes one token of a sequence a step here"


def _no_ranks(spec: DecoderSpec | T5Spec | None) -> str:
    """Return why a model of ours cannot be split over two ranks, the fewest there can be."""
    if spec is None:
        return ""
    try:
        check_split(spec, 2)
    except ModelLoadError as error:
        return str(error)
    return ""
