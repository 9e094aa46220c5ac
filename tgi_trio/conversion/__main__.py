"""`python -m tgi_trio.conversion convert FOLDER` or `merge ADAPTER BASE TARGET WHOSE`.

`child.py` runs it. WHOSE texts a merged model has: `own`, the adapter's, or `base`.

Logs its progress line by line to standard output. On failure, it writes the reason as one paragraph
at the end of standard error, and exits with 1.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from tgi_trio.errors import ModelLoadError, tell_reason


def main(argv: list[str]) -> int:
    """Run one job within the limits in `argv`: seconds of CPU time, bytes of memory."""
    seconds, memory, job, *words = argv
    _limit(int(seconds), int(memory))
    whose = words.pop() if job == "merge" else ""
    folder, *others = map(Path, words)
    try:
        if job == "convert":
            from tgi_trio.conversion.convert import convert_folder

            convert_folder(folder, say)
        else:
            from tgi_trio.conversion.lora import merge_adapter

            merge_adapter(folder, others[0], others[1], say, own_texts=whose == "own")
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"{[folder, *others][-1]} cannot be written to: {tell_reason(error)}", file=sys.stderr
        )
        return 1
    except MemoryError:
        print(f"{folder} needs more than {int(memory):,} bytes of memory", file=sys.stderr)
        return 1
    return 0


def say(line: str) -> None:
    """Report a line of progress to the parent process."""
    print(line, flush=True)


def _limit(seconds: int, memory: int) -> None:
    """Limit the resources that a malicious file can use."""
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
