"""`python -m tgi_trio.conversion convert FOLDER` or `merge ADAPTER BASE TARGET`: see `child.py`.

Says on standard output what it is doing, line by line, and at the end of standard error in one
paragraph why it could not be done; then it exits with 1.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from tgi_trio.errors import ModelLoadError


def main(argv: list[str]) -> int:
    """Do one job within the limits that `argv` gives: seconds of CPU time, bytes of memory."""
    seconds, memory, job, *words = argv
    _limit(int(seconds), int(memory))
    folder, *others = map(Path, words)
    try:
        if job == "convert":
            from tgi_trio.conversion.convert import convert_folder

            convert_folder(folder, say)
        else:
            from tgi_trio.conversion.lora import merge_adapter

            merge_adapter(folder, others[0], others[1], say)
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{[folder, *others][-1]} cannot be written to: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"{folder} needs more than {int(memory):,} bytes of memory", file=sys.stderr)
        return 1
    return 0


def say(line: str) -> None:
    """Tell whoever started this process."""
    print(line, flush=True)


def _limit(seconds: int, memory: int) -> None:
    """Bound what a file made to do harm can take of the machine."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.exit(main(sys.argv[1:]))
