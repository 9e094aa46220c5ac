"""The whole server with a fake shard: everything is real but the forward pass.

    python -m tgi_trio.testing.fake_server '{"step_ms": 1}' --port 3000

The first argument is FakeSettings as JSON, the rest are the server's flags. It uses the embedded
model's tokenizer, answers nonsense, and starts in well under a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from tgi_trio.__main__ import serve
from tgi_trio.cli.parser import parse
from tgi_trio.demo import model_path
from tgi_trio.model.facts import read_model_facts


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with a fake shard; raises what the server raises."""
    text, *flags = sys.argv[1:] if argv is None else argv
    vocab_size = read_model_facts(model_path()).vocab_size
    fake = json.dumps({"vocab_size": vocab_size, "first_id": 16, **json.loads(text)})

    def fake_shard(spec: str, settings: str) -> list[str]:
        return [sys.executable, "-m", "tgi_trio.testing.fake_shard", spec, fake]

    return serve(parse(flags, os.environ), fake_shard)


if __name__ == "__main__":
    sys.exit(main())
