"""llama.cpp's server out of xllamacpp, as `llama-server` would be started:

PEER/venv/bin/python bench/peers/xllamacpp_serve.py FILE PORT CLIENTS THREADS
"""

from __future__ import annotations

import signal
import sys
from typing import Any


def main(file: str, port: int, clients: int, threads: int) -> None:
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_parallel, params.n_ctx = clients, 1024 * clients  # tokens, shared by all
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server: Any = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
