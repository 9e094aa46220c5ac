"""What is to be quantised, and how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Progress = Callable[[Iterable[Any]], Iterable[Any]]  # wraps what takes long


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of a run."""

    model: Path
    output: Path
    group: int  # inputs that share a scale, -1: all
    damping: float
    by_activation: bool
    samples: int
    sample_tokens: int
    calibration_text: Path | None
    format: str = "gptq"  # or "gguf:q4_0", "gguf:q8_0"

    @property
    def staging(self) -> Path:
        return self.output.with_name(f"{self.output.name}.quantizing")

    def digest(self, text: str) -> str:
        """Return a hash that identifies this job: settings, weights and calibration text."""
        facts = {name: str(value) for name, value in asdict(self).items() if name != "output"}
        weights = {
            path.name: (path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(self.model.glob("*.safetensors"))
        }
        digest = hashlib.sha256(json.dumps([facts, weights]).encode())
        digest.update(text.encode("utf-8", errors="surrogatepass"))
        return digest.hexdigest()
