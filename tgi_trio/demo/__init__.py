"""The embedded demonstration model: where it lies and what it is called.

Importing this package is light: it brings in neither torch nor transformers, so the router may
import it to resolve ``MODEL_ID`` to a folder. `tools/demo/train.py` of the repository, which is in
no wheel, writes that folder.
"""

from __future__ import annotations

from pathlib import Path

MODEL_ID = "tgi-trio/demo"
"""The name under which the embedded model is served; it is resolved without any network."""


def model_path() -> Path:
    """Return the folder of the embedded model, in the layout of ``save_pretrained``."""
    return Path(__file__).resolve().parent / "model"


def heads_path() -> Path:
    """Return the folder of Medusa heads for the embedded model, where a release brings them.

    `tools/demo/train_heads.py` writes it.
    """
    return Path(__file__).resolve().parent / "heads"
