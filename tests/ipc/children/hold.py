"""A shard that shows it lives and then only sleeps: argv[2] MiB resident, argv[3] = how it ends."""

from __future__ import annotations

import sys
import time

from tgi_trio.ipc.death import start_shard_end
from tgi_trio.ipc.frames import Phase

end = start_shard_end(sys.argv[1])
ballast = b"x" * (int(sys.argv[2]) << 20)
end.beat(3, Phase.DECODE)
print("ready", flush=True)
if sys.argv[3:] == ["close"]:
    end.close()
time.sleep(3600)
