"""llama.cpp, built with this machine's compiler from the sources in the llama-cpp-python package.

Its weights are everybody's, in a GGUF file of its own (`to_gguf.py`): bfloat16 as they are, and
codes of GPTQ and AWQ as Q4_0. For its server; what a step takes is measured with
`llama_package.py`, which needs no compiler.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from bench.peers.environment import Environment

NAME = "llama.cpp"
_PACKAGE = "llama-cpp-python==0.3.36"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)
_TARGETS = ("llama-server",)
_RECIPE = " ".join((_PACKAGE, *_OPTIONS, *_TARGETS))


def write_gguf(environment: Environment, checkpoint: Path) -> Path:
    """Return the checkpoint as GGUF, written beside it the first time. Raises Unavailable.

    `environment` has gguf, and numpy.
    """
    file = checkpoint.with_suffix(".gguf")
    if not file.exists():
        unfinished = file.with_suffix(".part")
        script = Path(__file__).with_name("to_gguf.py")
        environment.run(
            "the conversion", environment.python, script, checkpoint, unfinished, "BF16"
        )
        unfinished.rename(file)
    return file


class LlamaCpp:
    """Its programs. Building them takes ten minutes on two cores, once."""

    def __init__(self, home: Path) -> None:
        """Install it under `home` unless it is there. Raises Unavailable."""
        self._environment = environment = Environment(home / "llama.cpp")
        if not environment.made(_RECIPE):
            environment.create()
            self._build()
            environment.finish(_RECIPE)

    def serve_command(self, checkpoint: Path, port: int, clients: int) -> list[str | Path]:
        """Return the command that serves `checkpoint` to as many clients at a time."""
        context = 1024 * clients  # tokens, shared by all
        return [
            *(self._program("llama-server"), "-m", write_gguf(self._environment, checkpoint)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--parallel", str(clients), "--ctx-size", str(context)),
        ]

    def _program(self, name: str) -> Path:
        return self._environment.folder / "build" / "bin" / name

    def _build(self) -> None:
        environment, folder = self._environment, self._environment.folder
        source = "--no-deps", "--no-binary", "llama-cpp-python"
        environment.pip("download", *source, "--dest", folder, _PACKAGE)
        archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        archive.unlink()
        vendored = next(folder.glob("llama_cpp_python-*")) / "vendor" / "llama.cpp"
        environment.pip("install", vendored / "gguf-py")
        build = folder / "build"
        environment.run("cmake", "cmake", "-S", vendored, "-B", build, *_OPTIONS)
        jobs = "--parallel", "2"
        environment.run("the build", "cmake", "--build", build, *jobs, "--target", *_TARGETS)
