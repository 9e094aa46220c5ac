"""Lists the files of one request: `python -m tools.walk [FLAGS OF THE SERVER]`."""

from __future__ import annotations

import sys

from tools.walk.request import trace_request

if __name__ == "__main__":
    for number, (process, file) in enumerate(trace_request(*sys.argv[1:]), start=1):
        print(f"{number:3} {process:6} {file}")
