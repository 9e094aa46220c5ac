"""A shard that checks the CRC in front of every frame and sends the frame back, checked again."""

from __future__ import annotations

import sys
import zlib

from tgi_trio.ipc.death import start_shard_end

end = start_shard_end(sys.argv[1])
while True:
    frame = end.try_receive()
    if frame is None:
        end.wait(5)
        continue
    if len(frame) == 0:
        break
    body = frame[4:]
    if zlib.crc32(body) != int.from_bytes(frame[:4], "little"):
        sys.exit("a request was damaged on the way")
    reply = end.reserve(len(frame))
    reply[:] = frame
    end.release()  # the request's bytes may be overwritten from here on: the reply is a copy
    end.commit()
end.close()
