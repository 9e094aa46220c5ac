"""Settings of a model's image processor: which of its files says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tgi_trio.model.config import read_json

NESTED: Final = "processor_config.json", "image_processor"  # since transformers 5; the key in it
ALONE: Final = "preprocessor_config.json"


def read_image_processor(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder's image processor, None if no file has any.

    Where a folder has both files the newer one counts, as in `transformers`
    (`get_image_processor_dict`): who saves a processor into a copy of a folder leaves the older
    one behind. Raises ModelLoadError for a file that cannot be read.
    """
    file, key = NESTED
    found = (read_json(folder / file) or {}).get(key)
    return found if isinstance(found, dict) else read_json(folder / ALONE)
