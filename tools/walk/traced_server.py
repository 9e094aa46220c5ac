"""The server, and its shard by `traced_shard`, with their calls noted.

python -m tools.walk.traced_server FOLDER [FLAGS]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import trio

from tgi_trio.__main__ import serve
from tgi_trio.cli.parser import parse
from tools.walk.calls import noting_calls

_STOP_S: Final = 60.0  # until a shard is killed that was told to end: it has its calls to write


class TaskNames:
    """Names trio's tasks by their functions, and numbers them in the order of their first calls."""

    def __init__(self) -> None:
        self._names: dict[trio.lowlevel.Task, str] = {}

    def __call__(self) -> str:
        """Return the name of the task that runs; "" outside of all."""
        try:
            task = trio.lowlevel.current_task()
        except RuntimeError:  # a worker's thread, or trio itself
            return ""
        function = task.name.rpartition(".")[2]
        return self._names.setdefault(task, f"{function} {len(self._names)}")


def main(arguments: list[str]) -> int:
    """Serve; the calls are in FOLDER afterwards."""
    folder, *flags = arguments

    def traced_shard(spec: str, settings: str) -> list[str]:
        return [sys.executable, "-m", "tools.walk.traced_shard", folder, spec, settings]

    with noting_calls(Path(folder) / "router.json", TaskNames()):
        return serve(parse(flags, os.environ), traced_shard, _STOP_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
