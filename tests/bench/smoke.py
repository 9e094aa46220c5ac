"""Every documented benchmark, so small that it takes seconds."""

from __future__ import annotations

# By module: the command line, as a shell would read it. CHECKPOINTS is a folder with a checkpoint
# of the shape `tiny`, NEW one that is not there yet.
SMALL: dict[str, str] = {
    "bench.arithmetic": "",
    "bench.bandwidth": "",
    "bench.chaos": "--faults 1 --clients 2",
    "bench.checkpoints": "tiny NEW",
    "bench.fuzz": "--count 40",
    "bench.grammars": "--streams 1 --company 1 --requests 1 --rounds 1",
    "bench.http": "--seconds 0.2 --repeats 1 --servers ours floor --cases 'short 64'",
    "bench.int8_quality": "--model-id CHECKPOINTS/tgi-trio-tiny --texts 1",
    "bench.ipc": "--quick --transports 'ring, event loop' 'gRPC sync'",
    "bench.live": "--probes 20",
    "bench.load": "--folder CHECKPOINTS/tgi-trio-tiny --shape tiny --cache warm --runs 1"
    " --backends numba",
    "bench.mixed": "--chats 2 --rounds 1 --max-tokens 24",
    "bench.model": "--checkpoints CHECKPOINTS --shapes tiny --cases 'decode 1' --peers --repeats 1"
    " --tries 1",
    "bench.restarts": "--times 1",
    "bench.sampler": "--batch 2 --vocab 2000 --spreads 1 --count 1",
    "bench.schedule": "--rounds 5 --steps 2000",
    "bench.schedule_policies": "--seconds 1 --profile chat",
    "bench.serve": "--concurrency 1 --requests 1 --max-tokens 4",
    "bench.serve_peers": "--checkpoints CHECKPOINTS --peers --shape tiny --clients 1 --requests 1"
    " --rounds 1",
    "bench.soak": "--requests 50 --settle 0.1 --idle 0.1",
    "bench.speculation": "--speculate 0 2 --batch 1 --new-tokens 8 --turns 1 --runs 1",
    "bench.startup": "--runs 1 --cold 0 --floors torch",
    "bench.step_gap": "--streams 1 --seconds 0.2",
    "bench.threads": "--shapes tiny --repeats 1",
    "bench.torch_step": "--folder CHECKPOINTS/tgi-trio-tiny --shape tiny --batches 1 --count 2",
}
# What prints figures for others, and writes none.
WITHOUT_RESULTS = {"bench.arithmetic", "bench.bandwidth", "bench.checkpoints"}
