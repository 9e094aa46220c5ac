"""Start two nodes of Ray on this machine and `tgi_trio cluster` on them; Ctrl-C ends all of it.

    python -m tools.two_nodes --replicas 2 --replicas-file replicas.txt --cpu-threads 1

The words are those of `python -m tgi_trio cluster`, but for `--address`, which is found here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CPUS = 2  # that each node says it has, whatever the machine has
STORE_BYTES = 80_000_000  # for objects, of which there are none; Ray takes no less


def main() -> int:
    """Run until SIGINT or SIGTERM; return the exit code of `cluster`."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES, include_dashboard=False)
        print(f"two nodes of Ray at {nodes.address}", flush=True)
        command = [sys.executable, "-m", "tgi_trio", "cluster", "--address", nodes.address]
        controller = subprocess.Popen([*command, *sys.argv[1:]], process_group=0)
        for number in (signal.SIGINT, signal.SIGTERM):  # servers end before what they run on
            signal.signal(number, lambda *_: os.kill(controller.pid, signal.SIGTERM))
        return controller.wait()
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    sys.exit(main())
