"""The facts in a model folder's files on which settings depend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tgi_trio.model.config import ModelConfig, RopeScaling, read_config, read_json
from tgi_trio.model.made_folders import OWN
from tgi_trio.model.quantised.recognise import find_word
from tgi_trio.model.speculators.mtp import count_mtp


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a model folder's config states, as far as settings depend on it."""

    path: Path
    model_type: str
    max_positions: int | None = None  # longest sequence in tokens; None: not stated
    tokenizer_max_length: int | None = None  # the tokenizer's own limit
    vocab_size: int | None = None
    tokenizer_path: Path | None = None  # None: the model's own folder
    dtype: str | None = None  # of the checkpoint, e.g. "bfloat16"
    quantize: str | None = None  # the format of its quantised weights, as --quantize calls it
    mtp_layers: int = 0  # of the checkpoint, which draft further tokens
    revision_sha: str | None = None  # commit, when the folder is a hub snapshot


def read_model_facts(
    path: Path, tokenizer_path: Path | None = None, rope: RopeScaling | None = None
) -> ModelFacts:
    """Read a model folder, and the folder of its tokenizer if that is another one.

    `rope`: rotary scaling that replaces the checkpoint's, and makes sequences longer. Raises
    ModelLoadError if its config cannot be used.
    """
    return find_model_facts(read_config(path, rope), tokenizer_path, rope)


def find_model_facts(
    config: ModelConfig, tokenizer_path: Path | None = None, rope: RopeScaling | None = None
) -> ModelFacts:
    """Do what `read_model_facts` does, with a config that has been read with `rope`."""
    path, stretch = config.folder, 1.0 if rope is None else rope.factor
    tokenizer_config = read_json((tokenizer_path or path) / "tokenizer_config.json") or {}
    longest = tokenizer_config.get("model_max_length")
    return ModelFacts(
        path=path,
        model_type=config.model_type,
        max_positions=config.max_positions or None,
        # transformers writes 1e30 for "no limit"
        tokenizer_max_length=int(longest * stretch)
        if isinstance(longest, int) and 0 < longest < 10**9
        else None,
        vocab_size=config.vocab_size or None,
        tokenizer_path=tokenizer_path,
        dtype=config.dtype,
        quantize=find_word(config),
        mtp_layers=count_mtp(config),
        revision_sha=_revision(path),
    )


def _revision(folder: Path) -> str | None:
    """Return the commit of a hub snapshot, None for other folders.

    Folders that are made of others' files have links into a snapshot: GGUF models', and those of
    models in several repositories, of which it is the commit of their own.
    """
    links = (path for pattern in ("*.gguf", f"{OWN}*") for path in folder.glob(pattern))
    linked = (path.parent / path.readlink() for path in links if path.is_symlink())
    places = [folder, *next(linked, folder).parents]
    return next((place.name for place in places if place.parent.name == "snapshots"), None)
