"""EAGLE-3's files: those of its authors and SpecForge, and those of `speculators`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    whole_linear,
    whole_units,
)
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.spec import EagleSpec, check_base

DRAFTED: Final = 4  # tokens ahead, if neither a flag nor config.json states it
# prefix of the one layer's tensors: the authors', speculators'
_LAYERS: Final = ("midlayer.", "layers.0.")
# Tensors that are not needed: the inverse token map, and parts of the model.
_UNREAD: Final = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def is_eagle3(values: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 drafter."""
    if find_names(values, "eagle3"):
        return True
    return "draft_vocab_size" in values and not values.get("speculators_model_type")


def find_names(values: Mapping[str, Any], part: str) -> list[str]:
    """Return the names of type and classes in a config.json that contain `part`."""
    words = [str(values.get("speculators_model_type") or ""), str(values.get("model_type") or "")]
    classes = values.get("architectures")
    words += [str(name) for name in classes] if isinstance(classes, list) else []
    return [word for word in words if part in word.lower().replace("-", "").replace("_", "")]


def read_draft_tokens(values: Mapping[str, Any]) -> int:
    """Return how many tokens a drafter in the speculators format proposes; `DRAFTED` for others."""
    methods = _object(values, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    found = first.get("speculative_tokens") if isinstance(first, dict) else None
    return found if isinstance(found, int) and 0 < found <= 64 else DRAFTED


def read_verifier(values: Mapping[str, Any]) -> str | None:
    """Return the name of the verifying model, as the speculators format states it, or None."""
    verifier = _object(_object(values, "speculators_config"), "verifier")
    name = verifier.get("name_or_path")
    return name if isinstance(name, str) and name else None


def read_eagle3(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    hidden: int,
    vocabulary: int,
) -> EagleSpec:
    """Return a folder's drafter, for a model with these numbers of hidden features and tokens.

    Raises ModelLoadError, naming what is wrong.
    """
    _check_states(folder, values)
    config = layer_config(folder, values)
    layer = read_layer(config)
    if config.vocab_size:
        check_base(folder, "vocab_size", config.vocab_size, vocabulary)
    named = NamedTensors(tensors)
    size, rows = layer.hidden_size, int(values.get("draft_vocab_size") or vocabulary)
    taps = _taps(folder, values)
    states = len(taps) or 3
    linears = {
        "fuse": whole_linear(named.matrix("fc", size, states * hidden)),
        **layer_linears(named, layer, inputs=2 * size),
        "head": whole_linear(named.matrix("lm_head", rows, size)),
    }
    vectors = {
        "embedding norm": (f"{named.layer}input_layernorm.weight", size),
        "state norm": (f"{named.layer}hidden_norm.weight", size),
        "mlp norm": (f"{named.layer}post_attention_layernorm.weight", size),
        "final norm": (named.full("norm.weight"), size),
        **_input_norms(folder, values, named, states, hidden),
    }
    tables = {}
    if size != hidden or named.full("embed_tokens.weight") in tensors:
        tables["embedding"] = named.matrix("embed_tokens", vocabulary, size)
    token_map = named.full("d2t") if rows != vocabulary or named.full("d2t") in tensors else ""
    read = named.list_read(linears, vectors)
    read += [matrix.name for matrix in tables.values()] + ([token_map] if token_map else [])
    named.refuse_others(read, _UNREAD, "an EAGLE-3 drafter of one layer of Llama's shape")
    return EagleSpec(
        folder=folder,
        heads=read_draft_tokens(values),
        linears=linears,
        vectors=vectors,
        tables=tables,
        tensors=tuple(read),
        token_map=token_map,
        maps_by_offset=True,
        layer=layer,
        max_positions=config.max_positions,
        norms_residual=bool(
            values.get("norm_before_residual", bool(values.get("speculators_model_type")))
        ),
        norms_output=_setting(values, "norm_output"),
        stated_taps=taps,
    )


def check_hidden_states(folder: Path, base: DecoderSpec) -> None:
    """Raise ConfigurationError if the drafter in `folder` cannot use the model's hidden states."""
    if any(layer.mixer for layer in base.layers):
        raise ConfigurationError(
            f"{folder} reads every token once, and a {base.family} model computes some again "
            "behind wrong drafts, since its layers keep states; use --speculate alone"
        )
    if base.streams is not None or base.hyper is not None or base.gated_streams is not None:
        raise ConfigurationError(
            f"{folder} reads the hidden state that goes into a layer, and layers of a "
            f"{base.family} model have several; use --speculate alone"
        )


class NamedTensors:
    """A folder's tensors by name: most names with or without "model." as prefix."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        layers = (before for before in _LAYERS if any(before in name for name in tensors))
        layer = next(layers, _LAYERS[0])
        self.layer = self.full(f"{layer}self_attn.q_proj.weight").removesuffix(
            "self_attn.q_proj.weight"
        )

    def full(self, name: str) -> str:
        """Return the folder's name of a tensor."""
        longer = f"model.{name}"
        return longer if longer in self._tensors and name not in self._tensors else name

    def matrix(self, name: str, rows: int, columns: int) -> MatrixRef:
        return self._matrix(self.full(f"{name}.weight"), rows, columns)

    def layer_matrix(self, name: str, rows: int, columns: int) -> MatrixRef:
        return self._matrix(f"{self.layer}{name}.weight", rows, columns)

    def list_read(
        self, linears: Mapping[str, LinearRef], vectors: Mapping[str, tuple[str, int]]
    ) -> list[str]:
        """Return the names of all tensors of linear layers and vectors."""
        matrices = [piece.matrix for ref in linears.values() for piece in ref.pieces]
        names = [matrix.name for matrix in matrices] + [name for name, _ in vectors.values()]
        return names + [matrix.bias for matrix in matrices if matrix.bias]

    def refuse_others(self, read: list[str], unread: Sequence[str], whole: str) -> None:
        """Raise ModelLoadError for tensors that would be ignored: they mean another drafter.

        `unread`: those that need not be read of `whole`.
        """
        known = {*read, *(self.full(name) for name in unread)}
        if others := sorted(self._tensors.keys() - known):
            raise ModelLoadError(
                f"Tensor {others[0]!r} in {self._tensors[others[0]].file} is no part of {whole}, "
                "which alone is served"
            )

    def _matrix(self, name: str, rows: int, columns: int) -> MatrixRef:
        bias = f"{name.removesuffix('weight')}bias"
        return MatrixRef(name, rows, columns, bias=bias if bias in self._tensors else "")


def layer_linears(named: NamedTensors, layer: DecoderSpec, *, inputs: int) -> dict[str, LinearRef]:
    """Return the linears of a drafter's layer, whose attention reads `inputs` features."""
    size = layer.hidden_size
    heads, kv_heads = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return {
        "qkv": _stacked(
            named.layer_matrix("self_attn.q_proj", heads, inputs),
            named.layer_matrix("self_attn.k_proj", kv_heads, inputs),
            named.layer_matrix("self_attn.v_proj", kv_heads, inputs),
        ),
        "output": whole_linear(named.layer_matrix("self_attn.o_proj", size, heads)),
        "inner": _stacked(
            named.layer_matrix("mlp.gate_proj", layer.mlp_width, size),
            named.layer_matrix("mlp.up_proj", layer.mlp_width, size),
        ),
        "down": whole_linear(named.layer_matrix("mlp.down_proj", size, layer.mlp_width)),
    }


def _input_norms(
    folder: Path, values: Mapping[str, Any], named: NamedTensors, states: int, hidden: int
) -> dict[str, tuple[str, int]]:
    """Return the norms of the model's states before they are fused: of all at once, or of each.

    Raises ModelLoadError for both.
    """
    whole, each = (_setting(values, name) for name in ("norm_before_fc", "fc_norm"))
    if whole and each:
        raise ModelLoadError(
            f"{folder / 'config.json'} says norm_before_fc and fc_norm, which exclude each other"
        )
    if whole:
        return {"input norm": (named.full("input_norm.weight"), states * hidden)}
    count = states if each else 0
    return {f"input norm {i}": (named.full(f"fc_norm.{i}.weight"), hidden) for i in range(count)}


def _setting(values: Mapping[str, Any], name: str) -> bool:
    """Return a setting: of the top level, as speculators writes it, or of eagle_config."""
    return bool(values.get(name) or _object(values, "eagle_config").get(name))


def _stacked(*matrices: MatrixRef) -> LinearRef:
    """Return stacked matrices with the same inputs."""
    return LinearRef(
        tuple(LinearPiece(m, whole_units(m.rows), whole_units(m.columns)) for m in matrices)
    )


def _check_states(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a drafter that does not read several hidden states."""
    if _object(values, "eagle_config").get("use_aux_hidden_state", True) is False:
        raise ModelLoadError(
            f"{folder / 'config.json'} says use_aux_hidden_state false; served are EAGLE-3 "
            "drafters that read hidden states of several layers"
        )


def read_layer(config: ModelConfig) -> DecoderSpec:
    """Return the spec of a drafter's one layer; raises ModelLoadError for what is not served."""
    layer = llama_spec(config, windows=_windows(config))
    if layer.activation != "silu" or len(layer.layers) != 1:
        raise ModelLoadError(
            f"the speculator in {config.folder} has {len(layer.layers)} layers with "
            f"{layer.activation!r}; served are EAGLE drafters of one layer with 'silu'"
        )
    return layer


def layer_config(folder: Path, values: Mapping[str, Any]) -> ModelConfig:
    """Return the config of the one layer; raises ModelLoadError for a damaged config.json."""
    own = {**values, **_object(values, "transformer_layer_config")}
    own.setdefault("num_hidden_layers", 1)
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"):
        _need(folder, own, name)
    counts = {name: own.get(name) or 0 for name in ("vocab_size", "max_position_embeddings")}
    for name in counts:
        if counts[name]:
            _need(folder, own, name)
    if values.get("draft_vocab_size") is not None:
        _need(folder, values, "draft_vocab_size")
    return ModelConfig(
        folder=folder,
        model_type="eagle3",
        dtype=None,
        vocab_size=counts["vocab_size"],
        max_positions=counts["max_position_embeddings"],
        eos_ids=(),
        values=own,
    )


def _windows(config: ModelConfig) -> list[int]:
    """Return the window of each layer, 0 without one: only layer_types says that there is one."""
    found, count = config.get("layer_types"), int(config.need("num_hidden_layers"))
    types = found[:count] if isinstance(found, list) else []
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding):
        _need(config.folder, config.values, "sliding_window")
    window = config.get("sliding_window", 0)
    return [window if own else 0 for own in sliding] + [0] * (count - len(sliding))


def _taps(folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return which hidden states are read (`EagleSpec.taps`), () if config.json does not state it.

    On the top level, as for vLLM and speculators, the numbers are those of the layers that read the
    states; in eagle_config, as for SGLang and SpecForge, those of the layers that produce them.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    found, behind = values.get(name), 0
    if not found:
        found, behind = _object(values, "eagle_config").get(name), 1
    if not found:
        return ()
    if not isinstance(found, list) or not all(type(i) is int for i in found) or len(found) > 8:
        raise ModelLoadError(
            f"{folder / 'config.json'} says {name} {found!r}; a list of numbers of layers is needed"
        )
    return tuple(i + behind for i in found)


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _need(folder: Path, values: Mapping[str, Any], name: str) -> None:
    found = values.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelLoadError(
            f"{folder / 'config.json'} says {name} {found!r}; an EAGLE drafter needs a number "
            "above 0"
        )
