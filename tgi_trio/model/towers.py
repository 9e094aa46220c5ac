"""Whether a composite model's folder has the weights that images or sounds need, by their names."""

from __future__ import annotations

from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import stored_names
from tgi_trio.model.leftovers import has_audio_tower, has_vision_tower


def lacks_vision_tower(folder: Path) -> bool:
    """Return whether a folder has weights, and none of them is a tower's."""
    try:
        return not has_vision_tower(stored_names(folder))
    except ModelLoadError:  # there are no weights yet
        return False


def lacks_audio_tower(folder: Path) -> bool:
    """Return whether a folder has weights, and none of them is for sounds."""
    try:
        return not has_audio_tower(stored_names(folder))
    except ModelLoadError:
        return False
