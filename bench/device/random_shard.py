"""A shard of a real shape with random weights made on its device: no checkpoint is read.

    python -m bench.device.random_shard CHANNEL_SPEC '{"shape": "8B"}' SHARD_SETTINGS

It takes the place of `python -m tgi_trio.shard`; see `random_server.py`. Options: "shape", a key of
`shapes.SHAPES`; "device", as for --device; "break_at", a step of "break_rows" rows behind which
the device is broken for good, and "broken", a file that says when that was: the shard that comes
next is sound; "steps", a file that says at the end how long steps took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard import process
from tgi_trio.shard.runner import Runner


def load(options: dict[str, Any], settings: ShardSettings) -> Runner:
    """Make the model that the options name, in the dtype that is its own on the device."""
    import torch

    from bench.device.breaking import BreakingRunner
    from bench.device.models import make_runner
    from bench.device.timed_steps import TimedRunner
    from tgi_trio.shard.machine.device import choose_device, graph_sizes
    from tgi_trio.shard.torch_backend.torch_device import resolve_device

    device = choose_device(options.get("device", "auto"))
    sizes = graph_sizes(device, settings.cuda_graphs)
    where = resolve_device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    runner = make_runner(options["shape"], where, dtype, sizes)
    if "steps" in options:
        return TimedRunner(runner)
    broken = Path(options.get("broken", "/"))
    if "break_at" not in options or broken.exists():
        return runner
    return BreakingRunner(runner, options["break_at"], options["break_rows"], broken)


def main(argv: list[str]) -> int:
    """Serve the channel named on the command line; return an exit code."""
    spec, options, told = argv[0], json.loads(argv[1]), ShardSettings.parse(argv[2])
    runner: Any = None

    def factory() -> Runner:
        nonlocal runner
        made = runner = load(options, told)
        return made

    code = process.serve(spec, factory, told)
    if "steps" in options and runner is not None:
        runner.write(Path(options["steps"]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
