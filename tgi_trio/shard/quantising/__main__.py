"""`python -m tgi_trio.shard.quantising JOB PID`: write a model with weights of fewer bits.

JOB is a JSON object with `Job`'s fields, PID that of the command, with which this process ends. A
progress bar is shown on standard error; an error is printed there in one line, and the exit code is
then 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tgi_trio.errors import ConfigurationError, ModelLoadError, PeerGone, tell_reason
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.shard.machine.cores import usable_cores
from tgi_trio.shard.machine.openmp import openmp_settings
from tgi_trio.shard.quantising.job import Job
from tgi_trio.shard.quantising.quantise import quantise_model


def main(text: str) -> int:
    """Do one job; return the exit code."""
    words = json.loads(text)
    words["model"], words["output"] = Path(words["model"]), Path(words["output"])
    if words["calibration_text"] is not None:
        words["calibration_text"] = Path(words["calibration_text"])
    quiet = bool(words.pop("quiet", False))

    def bar(parts: Iterable[Any]) -> Iterable[Any]:
        yield from tqdm(parts, disable=quiet)

    try:
        # beside other work, torch's spinning threads would waste most of a core
        cores = usable_cores()
        os.environ.update(openmp_settings(len(cores), cores, os.environ))
        quantise_model(Job(**words), bar)
    except (ConfigurationError, ModelLoadError, OSError) as error:
        print(f"tgi-trio: {tell_reason(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        die_with_parent(int(sys.argv[2]))
    except PeerGone:  # it was stopped before it could stop us
        sys.exit(1)
    sys.exit(main(sys.argv[1]))
