"""`python -m tgi_trio.cluster.kept_server PID WORDS`: the server, which ends when PID does.

Ray kills an actor's process when its keeper or its node's raylet is gone; what that process had
started would stay behind, and hold the device.
"""

from __future__ import annotations

import runpy
import sys

from tgi_trio.ipc.parent import die_with_parent


def main() -> None:
    """Tie this process to its parent, then be `python -m tgi_trio WORDS`."""
    die_with_parent(int(sys.argv.pop(1)))
    runpy.run_module("tgi_trio", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
