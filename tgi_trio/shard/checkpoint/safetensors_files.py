"""The container of most checkpoints: safetensors, one file or several.

The library's own numpy reader has no bfloat16, so the files are mapped here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from tgi_trio.model.checkpoint_files import StoredTensor, read_headers
from tgi_trio.shard.checkpoint.mapped_files import MappedFiles


class SafetensorsFiles(MappedFiles):
    """A folder of safetensors files."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor] | None = None,
        *,
        given_back: Collection[Path] = (),
        kept: Collection[str] = (),
        writable: bool = False,
    ) -> None:
        """As for `MappedFiles`; `tensors` None: from the files' headers.

        Raises ModelLoadError as `read_headers` does.
        """
        tensors = read_headers(folder) if tensors is None else tensors
        super().__init__(folder, tensors, given_back=given_back, kept=kept, writable=writable)
