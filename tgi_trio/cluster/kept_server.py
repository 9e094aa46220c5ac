"""`python -m tgi_trio.cluster.kept_server PID ARGUMENTS`: tgi-trio, which dies with process PID.

Ray kills an actor's process when its driver or its node's raylet is gone. Without this, the server
that the actor has started would be left behind and hold the device.
"""

from __future__ import annotations

import runpy
import sys

from tgi_trio.ipc.parent import die_with_parent


def main() -> None:
    """Tie this process to its parent, then run `python -m tgi_trio ARGUMENTS`."""
    die_with_parent(int(sys.argv.pop(1)))
    runpy.run_module("tgi_trio", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
