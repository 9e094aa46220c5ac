"""A tower and projector of transformers, with their weights only.

The family's class is built from its config on the meta device, its text model is removed, and the
remaining parameters are loaded from the checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.images import BESIDE_IMAGES, SOUND, SOUND_MASK
from tgi_trio.model import nemotron_omni, qwen3_asr
from tgi_trio.model.config import read_values
from tgi_trio.model.gguf.folder import find_projector
from tgi_trio.model.image_families import IMAGE_FAMILIES, ImageFamily
from tgi_trio.model.parts import ULTRAVOX
from tgi_trio.model.phi4mm import PHI4
from tgi_trio.model.published import describe_class
from tgi_trio.shard.checkpoint.container import Container
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.machine.cores import running_on
from tgi_trio.shard.media.audio_encoders import AUDIO_ENCODERS, BESIDE, EncodeAudio
from tgi_trio.shard.media.cross_states import CROSS_STATES, EncodeStates
from tgi_trio.shard.media.features import Bundle, ImageFeatures
from tgi_trio.shard.media.image_encoders import (
    AMENDS,
    COMPUTES,
    IMAGE_ENCODERS,
    EncodeImage,
)
from tgi_trio.shard.media.marks import MARKS, Mark
from tgi_trio.shard.media.normalising import Normalising
from tgi_trio.shard.media.projector_parameters import ReadParameter, open_projector
from tgi_trio.shard.media.spellings import spellings
from tgi_trio.shard.media.tower_parameters import read_parameter

_PIXELS: Final = "pixel_values"
# Bytes until they are normalised, and the prefix of the settings that say how.
_PICTURES: Final = {_PIXELS: "", "pixel_values_local": "", "high_res_pixel_values": "high_res_"}
# Of classes with audio input as well.
_HEARING: Final = ("audio_tower", "embed_audio", "embed_tokens_extend.audio_embed")
# What building raises; RuntimeError: a torchvision that was built for another torch.
_UNBUILT: Final = (
    *(ImportError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError),
)
# Booleans; other inputs beside the pixels are int64.
_MASKS: Final = frozenset({"pixel_attention_mask"})
# Of types whose classes cannot read what files say: what they are configured with.
_DESCRIBE: Final = {
    nemotron_omni.NEMOTRON_OMNI: nemotron_omni.describe_class,
    qwen3_asr.QWEN3_ASR: qwen3_asr.describe_class,
}
_SIGHTLESS: Final = ImageFamily("", "")  # of models that only hear


class TorchTower:
    """An `ImageEncoder`."""

    def __init__(
        self,
        model: Any,
        normalisings: Mapping[str, Normalising],
        device: torch.device,
        dtype: torch.dtype,
        cores: Set[int] = frozenset(),
        projector: str = "",
        encode_states: EncodeStates | None = None,
        text_dtype: torch.dtype = torch.float32,
        mark: Mark | None = None,
        encode_audio: EncodeAudio | None = None,
        encode_audio_beside: EncodeAudio | None = None,
        encode_image: EncodeImage | None = None,
    ) -> None:
        """`model`: a transformers class without its text model. `normalisings`: by prefix; none: it
        does not see.

        `cores`: where it may compute, even if this thread is pinned by then; if empty, where this
        thread may. `projector`: as in `ImageFamily`. `encode_states`: for cross-attention, computes
        keys and values in `text_dtype`. `mark`: adds features of marks. `encode_audio`: of sounds;
        None: none are heard. `encode_audio_beside`: likewise, of prompts with images; None: as
        others. `encode_image`: of images, in place of the class's own.
        """
        self._model = model
        self._project = getattr(model, projector) if projector else None
        self._normalisings = normalisings
        self._device = device
        self._dtype = dtype
        self._cores = cores
        self._encode_states = encode_states
        self._mark = mark
        self._encode_audio = encode_audio
        self._encode_audio_beside = encode_audio_beside or encode_audio
        self._encode_image = encode_image
        self._text_dtype = text_dtype
        # Granite and its kin multiply all that their text reads, features among it.
        text = model.config.get_text_config(decoder=True)
        self._scale = float(getattr(text, "embedding_multiplier", 1.0))
        self._seen = 0  # images, counted for cross-attention
        self._taken: frozenset[str] = frozenset()
        if normalisings and encode_image is None:
            reads = (
                model.get_image_features if encode_states is None else model.vision_model.forward
            )
            self._taken = frozenset(inspect.signature(reads).parameters)

    @torch.inference_mode()
    def encode(self, bundle: Bundle) -> ImageFeatures:
        if SOUND in bundle:
            return self._encode_sound(bundle)
        if _PIXELS not in bundle or not self._normalisings:
            raise ValueError(f"a bundle of {', '.join(bundle) or 'nothing'} has no pixels")
        taken = self._taken or bundle.keys()
        inputs = {name: self._load(name, bundle[name]) for name in bundle if name in taken}
        with running_on(self._cores) if self._cores else nullcontext():
            if self._encode_states is not None:
                self._seen += 1
                states = self._encode_states(self._model, inputs, self._text_dtype)
                states = replace(states, number=self._seen)
                return ImageFeatures(np.empty((0, 0), np.float32), states=states)
            if self._encode_image is not None:
                return ImageFeatures(
                    _bring_down(self._encode_image(self._model, inputs, self._dtype))
                )
            found = self._model.get_image_features(**inputs)
            if self._project is not None:
                return ImageFeatures(_bring_down(self._project(found.last_hidden_state)))
            if self._mark is not None:
                return ImageFeatures(_bring_down(self._mark(self._model, found, bundle)))
            deep = getattr(found, "deepstack_features", None) or ()
            if found.pooler_output is None:
                return _add_before_layers(deep)
            rows = _bring_down(found.pooler_output) * np.float32(self._scale)
            return ImageFeatures(rows, dict(enumerate(map(_bring_down, deep))))

    def _encode_sound(self, bundle: Bundle) -> ImageFeatures:
        encode_audio = self._encode_audio_beside if BESIDE_IMAGES in bundle else self._encode_audio
        if encode_audio is None:
            raise ValueError("this server computes no audio of this model")
        features = torch.from_numpy(bundle[SOUND].copy()).to(self._device, self._dtype)
        mask = torch.from_numpy(bundle[SOUND_MASK].astype(np.bool_)).to(self._device)
        with running_on(self._cores) if self._cores else nullcontext():
            rows = _bring_down(encode_audio(self._model, features, mask))
            return ImageFeatures(rows * np.float32(self._scale))

    def _load(self, name: str, values: NDArray[Any]) -> torch.Tensor:
        if name in _PICTURES:
            pixels = torch.from_numpy(self._normalisings[_PICTURES[name]].apply(values))
            return pixels.to(self._device, torch.float32 if self._encode_image else self._dtype)
        kind = np.bool_ if name in _MASKS else np.int64
        return torch.from_numpy(values.astype(kind)).to(self._device)


def load_tower(
    folder: Path,
    model_type: str,
    device: torch.device,
    dtype: torch.dtype,
    cores: Set[int] = frozenset(),
    text_dtype: torch.dtype = torch.float32,
    *,
    hears: bool = False,
) -> TorchTower:
    """Return the tower of the model in `folder`, whose text is computed in `text_dtype`.

    `hears`: with what sounds need.

    Raises ModelLoadError if transformers cannot build it, or if a tensor is missing.
    """
    family = IMAGE_FAMILIES.get(model_type, _SIGHTLESS)
    normalisings: dict[str, Normalising] = {}
    if family is not _SIGHTLESS:
        prefixes = ["", "high_res_"] if family.two_sizes else [""]
        normalisings = {prefix: Normalising.read(folder, family, prefix) for prefix in prefixes}
    keep, encode_states = CROSS_STATES.get(model_type, (None, None))
    model = _build(folder, () if keep else family.text_parts, hears=hears)
    if keep is not None:
        keep(model)
    if model_type in COMPUTES:
        model.compute_missing = partial(COMPUTES[model_type], model)
    with _open_parameters(folder, model) as read:
        _fill(model, read, device, dtype)
    if model_type in AMENDS:
        AMENDS[model_type](model)
    return TorchTower(
        model.eval(),
        normalisings,
        device,
        dtype,
        cores,
        projector=family.projector,
        encode_states=encode_states,
        text_dtype=text_dtype,
        mark=MARKS.get(model_type),
        encode_audio=AUDIO_ENCODERS[model_type] if hears else None,
        encode_audio_beside=BESIDE.get(model_type) if hears else None,
        encode_image=IMAGE_ENCODERS.get(model_type),
    )


def _build(folder: Path, text_parts: Sequence[str], *, hears: bool) -> Any:
    """Return a family's class on the meta device, without these parts of its text.

    `hears`: with its audio parts.
    """
    from transformers import AutoModel, AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            if (read_values(folder) or {}).get("model_type") == ULTRAVOX:
                from tgi_trio.shard.media.ultravox_tower import build_ultravox

                return build_ultravox(folder)
            config = _read_class_config(folder)
            config = getattr(config, "thinker_config", config)  # of models that speak as well
            # Nemotron 3 Nano Omni has a class with its text's head alone.
            known = type(config) in AutoModel._model_mapping
            build: Any = AutoModel if known else AutoModelForImageTextToText
            model = build.from_config(config)
    except _UNBUILT as error:
        raise ModelLoadError(f"transformers cannot build the tower of {folder}: {error}") from error
    for part in (*text_parts, *(() if hears else _HEARING)):
        place, _, name = part.rpartition(".")
        owner = getattr(model, place, None) if place else model
        if hasattr(owner, name):
            delattr(owner, name)
    return model


def _read_class_config(folder: Path) -> Any:
    """Return the configuration of a family's class; raises what building does, ModelLoadError."""
    from transformers import AutoConfig

    values = read_values(folder) or {}
    kind = str(values.get("model_type"))
    if (described := describe_class(values)) is not None:
        return AutoConfig.for_model(kind, **described)
    if kind in _DESCRIBE:
        return AutoConfig.for_model(kind, **_DESCRIBE[kind](values))
    if kind != PHI4:  # of which transformers may not know what the file says
        return AutoConfig.from_pretrained(folder)
    return AutoConfig.for_model(values.pop("model_type"), **values)


@contextmanager
def _open_parameters(folder: Path, model: Any) -> Iterator[ReadParameter]:
    """Open the files that have a tower, and yield what reads a parameter of `model` in them."""
    projector = find_projector(folder)
    if projector is not None:
        with open_projector(projector) as read:
            yield read
        return
    files = SafetensorsFiles(folder)
    heads = getattr(getattr(model.config, "vision_config", None), "num_attention_heads", 0)
    try:
        yield lambda name, shape: _read_or_compute(model, files, name, shape, heads)
    finally:
        files.close()


def _fill(model: Any, read: ReadParameter, device: torch.device, dtype: torch.dtype) -> None:
    """Load a meta model's tensors, and compute those that no checkpoint has."""
    state, wide = {}, _list_wide(model)
    for name, wanted in model.state_dict().items():
        if not wanted.is_floating_point():  # counts of what was seen in training
            continue
        values = read(name, tuple(wanted.shape))
        kept = any(f".{part}." in f".{name}." for part in wide)
        state[name] = torch.from_numpy(values).to(device, torch.float32 if kept else dtype)
    model.load_state_dict(state, strict=False, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for tensor in model.state_dict(keep_vars=True).values():
        # So that transformers' initialisation leaves them unchanged.
        tensor._is_hf_initialized = True
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer.is_meta and name not in state:  # positions, frequencies
            owner, _, own = name.rpartition(".")
            empty = torch.empty_like(buffer, device=device)
            setattr(model.get_submodule(owner), own, empty)
    model.initialize_weights()


def _read_or_compute(
    model: Any, files: Container, name: str, shape: tuple[int, ...], heads: int
) -> NDArray[np.float32]:
    """Return a parameter as `read_parameter` does, computed where files lack it and may do so."""
    compute = getattr(model, "compute_missing", None)  # of a class of ours, or in `COMPUTES`
    lacks = not any(each in files.names for each in spellings(name))
    computed = compute(name) if compute is not None and lacks else None
    if computed is None:
        return read_parameter(files, name, shape, heads)
    found: NDArray[np.float32] = computed.numpy()
    return found


def _list_wide(model: Any) -> frozenset[str]:
    """Return the modules that transformers keeps in float32, whatever the others are in.

    They are named by the class of the whole model (Voxtral: positions).
    """
    import transformers

    names = getattr(model.config, "architectures", None) or ()
    owners = (model, *(getattr(transformers, name, None) for name in names))
    every = (getattr(owner, "_keep_in_fp32_modules_strict", None) or () for owner in owners)
    return frozenset(name for own in every for name in own)


def _add_before_layers(deep: Sequence[tuple[int, Any]]) -> ImageFeatures:
    """Return features that are added before layers of these numbers, to nothing: no other stands
    for the tokens (Granite 4 Vision).
    """
    added = {layer - 1: _bring_down(rows) for layer, rows in deep}
    nothing = np.zeros_like(next(iter(added.values())))
    return ImageFeatures(added.pop(-1, nothing), added)


def _bring_down(features: Any) -> NDArray[np.float32]:
    """Return features as float32 [N, hidden], from a tensor or several, with leading dimensions."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    joined = torch.cat([part.flatten(0, -2) for part in parts])
    found: NDArray[np.float32] = joined.float().cpu().numpy()
    return found
