"""Parameters of towers as files have them: of any number of dimensions, and with channels last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.media.tower_parameters import read_parameter

NAME = "audio_tower.layers.0.weight"


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (4, 3, 2), (4, 3, 2, 2)])
@pytest.mark.parametrize("moved", [False, True])
def test_a_parameter_is_read(tmp_path: Path, shape: tuple[int, ...], moved: bool) -> None:
    """Bounds of Gemma 4's clipped projections have none; convolutions of MLX end in channels."""
    expected = torch.randn(shape)
    stored = expected.moveaxis(1, -1) if moved and len(shape) > 2 else expected
    save_file({f"model.{NAME}": stored.contiguous()}, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    try:
        assert (read_parameter(files, NAME, shape, 2) == expected.numpy()).all()
    finally:
        files.close()
