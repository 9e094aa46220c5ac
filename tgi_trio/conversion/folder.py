"""The pickles of a model folder that are its weights, and whether to convert them.

Converted files record their source in the metadata (`SOURCE`), with its size and time: a pickle
that changes later is converted again, and original safetensors files are never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.whole_files import open_file, parse_json, read_file

SOURCE: Final = "converted_from"  # key in the metadata
STAGING: Final = ".converting"  # holds a conversion's finished files until all are finished
INDEX: Final = "pytorch_model.bin.index.json"
NEW_INDEX: Final = "model.safetensors.index.json"
_LONGEST_HEADER: Final = 100_000_000  # bytes; the limit of safetensors
# Parts of the names of other pickles beside weights; TGI excludes the first three as well.
_NO_WEIGHTS: Final = (
    "arguments", "args", "training", "optimizer", "scheduler", "rng_state", "scaler", "adapter_",
    "openvino", "medusa_",
)  # fmt: skip


def list_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, without those of an adapter."""
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))


def find_pickles(folder: Path, extensions: Sequence[str] = (".bin", ".pt")) -> list[Path]:
    """Return the pickles of a model's weights, with the first extension that has any.

    A speculator's heads count as weights if there are no others.

    Raises ModelLoadError if an index names missing files.
    """
    if ".bin" in extensions and (folder / INDEX).is_file():
        return _list_indexed(folder)
    for extension in extensions:
        found = [p for p in sorted(folder.glob(f"*{extension}")) if _may_be_weights(p.name)]
        usual = [p for p in found if p.stem == "pytorch_model"]
        numbered = [p for p in found if p.stem.startswith("pytorch_model-")]
        if chosen := usual or numbered or found:
            return chosen
    # Medusa's heads are beside a model's weights, or without any.
    return sorted(folder.glob("medusa_lm_head.pt")) if ".pt" in extensions else []


def _may_be_weights(name: str) -> bool:
    return not any(word in name for word in _NO_WEIGHTS)


def _list_indexed(folder: Path) -> list[Path]:
    names = sorted(set(read_index(folder / INDEX).values()))
    if foreign := [name for name in names if Path(name).name != name]:
        raise ModelLoadError(f"{folder / INDEX} names {foreign[0]!r}, which is no file beside it")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelLoadError(
            f"{folder} is incomplete: {INDEX} names {', '.join(missing)}, "
            f"which {'is' if len(missing) == 1 else 'are'} not there. Download or copy it again"
        )
    return [folder / name for name in names]


def read_index(path: Path) -> dict[str, str]:
    """Return an index of weights, tensor -> file; {} if there is none.

    Raises ModelLoadError if it cannot be read.
    """
    try:
        table = parse_json(read_file(path))["weight_map"]
        return {str(tensor): str(file) for tensor, file in table.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = tell_reason(error, path)
        raise ModelLoadError(f"{path} cannot be read as an index of weights: {why}") from error


def target_name(pickle: Path) -> str:
    """Return the name of a pickle's converted file, which is transformers' name for it."""
    return f"{pickle.stem.removeprefix('pytorch_')}.safetensors"


def identity(pickle: Path) -> str:
    """Return the metadata's text for a source: name, bytes and time of the last change in ns."""
    state = pickle.stat()
    return f"{pickle.name}:{state.st_size}:{state.st_mtime_ns}"


def conversion_due(folder: Path) -> bool:
    """Return whether to convert a folder's pickles: never converted, not completely, or changed."""
    sources = [_metadata(path).get(SOURCE) for path in list_weights(folder)]
    if not all(isinstance(source, str) for source in sources):
        return False  # the folder has original safetensors files
    if not find_pickles(folder):
        return False
    if not sources or (folder / STAGING).is_dir():
        return True
    return any(_has_changed(folder, str(source)) for source in sources)


def _has_changed(folder: Path, source: str) -> bool:
    path = folder / source.rsplit(":", 2)[0]
    return path.is_file() and identity(path) != source


def _metadata(path: Path) -> dict[str, Any]:
    """Return a safetensors file's metadata; {} if it cannot be read."""
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length)) if length <= _LONGEST_HEADER else {}
        found = header.get("__metadata__") if isinstance(header, dict) else None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def model_files(folder: Path) -> list[Path]:
    """Return the files from which a model is loaded, safetensors or GGUF; raises ModelLoadError."""
    if index := read_index(folder / NEW_INDEX):
        return [folder / name for name in sorted(set(index.values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else list_weights(folder) or sorted(folder.glob("*.gguf"))
