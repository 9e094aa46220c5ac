"""GGUF files as a container: tensors under the names of the model's family."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tgi_trio.model.checkpoint_tensors import gguf_files
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.gguf.tensors import read_gguf_tensors
from tgi_trio.shard.checkpoint.mapped_files import MappedFiles


class GgufFiles(MappedFiles):
    """A model's GGUF files."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        given_back: Collection[Path] = (),
        kept: Collection[str] = (),
        writable: bool = False,
    ) -> None:
        """As for `MappedFiles`. Raises ModelLoadError as `read_gguf_tensors` does."""
        folder = config.folder
        tensors = read_gguf_tensors(gguf_files(folder), config)
        super().__init__(folder, tensors, given_back=given_back, kept=kept, writable=writable)
