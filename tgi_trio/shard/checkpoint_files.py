"""The files of a checkpoint folder, and which tensor lies in which. No torch in this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tgi_trio.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")


def find_safetensors(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file of a checkpoint folder.

    Raises ModelLoadError for a folder without safetensors (naming the command that converts it),
    a file that is missing, truncated or unreadable.
    """
    if (folder / _INDEX).exists():
        return _from_index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:  # adapters and draft heads may lie beside it
        files = [folder / "model.safetensors"]
    if not files:
        raise ModelLoadError(_no_safetensors(folder))
    where: dict[str, Path] = {}
    for file in files:
        with open_safetensors(file, "np") as opened:
            where.update(dict.fromkeys(opened.keys(), file))
    return where


def _from_index(folder: Path) -> dict[str, Path]:
    path = folder / _INDEX
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        where = {str(name): folder / str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error!r}.") from error
    missing = sorted({file.name for file in where.values() if not file.exists()})
    if missing:
        raise ModelLoadError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names.")
    return where


def _no_safetensors(folder: Path) -> str:
    others = sorted(file.name for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    if not others:
        return f"{folder} holds no weights: there is no .safetensors file in it."
    return (
        f"{folder} holds {others[0]} but no .safetensors, the only format served. Convert it with: "
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"s, d = '{folder}', '{folder}-safetensors'; M.from_pretrained(s, dtype='auto')"
        '.save_pretrained(d); T.from_pretrained(s).save_pretrained(d)"'
    )


def open_safetensors(file: Path, framework: str) -> Any:
    """Map a file, its tensors to be "pt" (torch's) or "np"; raises ModelLoadError if it cannot."""
    try:
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file} cannot be read as safetensors ({error}); it may be truncated: "
            f"it has {file.stat().st_size if file.exists() else 0} bytes. Download it again."
        ) from error
