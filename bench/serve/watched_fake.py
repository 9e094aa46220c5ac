"""`python -m bench.serve.watched_fake FILE FAKE FLAGS...`: the server on a fake model, turns timed.

As `bench.images.watched_server`; FAKE is FakeSettings as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.images.watched_server import serve
from tgi_trio.testing import fake_server

if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.argv[2:], fake_server.main))
