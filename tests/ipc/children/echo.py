"""A shard that sends every frame back, until a frame says b"quit"."""

from __future__ import annotations

import sys

from tgi_trio.ipc.death import start_shard_end
from tgi_trio.ipc.frames import Phase

end = start_shard_end(sys.argv[1])
print("ready", flush=True)
step = 0
while True:
    frame = end.try_receive()
    if frame is None:
        end.beat(step, Phase.IDLE)
        end.wait(0.05)
        continue
    if frame == b"quit":
        break
    step += 1
    end.beat(step, Phase.DECODE)
    end.send(frame)
    end.release()
end.close()
