"""A shard whose calls are noted: `python -m tools.walk.traced_shard FOLDER SPEC SETTINGS`."""

from __future__ import annotations

import sys
from pathlib import Path

from tgi_trio.shard.__main__ import main as run_shard
from tools.walk.calls import noting_calls


def main(arguments: list[str]) -> int:
    """Run the shard; its calls are in FOLDER afterwards."""
    folder, *rest = arguments
    with noting_calls(Path(folder) / "shard.json"):
        return run_shard(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
