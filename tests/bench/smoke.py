"""Every documented benchmark and stress run, so small that it takes seconds."""

from __future__ import annotations

# By module: the command line, as a shell would read it. CHECKPOINTS is a folder with a checkpoint
# of the shape `tiny` and its GGUF file, NEW one that is not there yet.
SMALL: dict[str, str] = {
    "bench.cluster.front": "--streams 1 --killed-under 2 --tokens 16 --turns 1 --requests 2"
    " --answers 8",
    "bench.cluster.routing": "--replicas 4 --seconds 20",
    "bench.device": "--dry-run",
    "bench.device.host_copies": "--dry-run --repeats 1",
    "bench.harness.checkpoints": "tiny NEW",
    "bench.http": "--seconds 0.2 --repeats 1 --servers ours floor --cases 'short 64'",
    "bench.http.chat": "--runs 2 --prompts 1 --repeats 1",
    "bench.http.live": "--probes 20 --most-streams 8",
    "bench.images": "--sizes 0.1 --clients 2 --images 2 --side 32 --streams 1 --tokens 4"
    " --attacks 0 --rounds 1",
    "bench.ipc": "--quick --transports 'ring, event loop' 'gRPC sync'",
    "bench.load": "--folder CHECKPOINTS/tgi-trio-tiny --shape tiny --cache warm --runs 1"
    " --backends kernels",
    "bench.load.cold": "--forms embedded",
    "bench.load.conversations": "--shape tiny --tokens 256 --conversations 2 --turns 2 "
    "--checkpoints CHECKPOINTS",
    "bench.load.restart": "--shape tiny --tokens 64 --turns 1 --checkpoints CHECKPOINTS",
    "bench.load.startup": "--runs 1 --cold 0 --floors torch",
    "bench.machine.arithmetic": "",
    "bench.machine.bandwidth": "",
    "bench.mixed": "--chats 2 --rounds 1 --max-tokens 24",
    "bench.mixed.grammars": "--streams 1 --company 1 --requests 1 --rounds 1",
    "bench.model": "--checkpoints CHECKPOINTS --shapes tiny --cases 'decode 1' --peers --repeats 1"
    " --tries 1",
    "bench.model.accuracy": "--shapes --files CHECKPOINTS/tgi-trio-tiny-BF16.gguf --peers --texts 1"
    " --checkpoints CHECKPOINTS",
    "bench.model.adapter_load": "--shape tiny --turns 1 --period 0.3 --tokens 16"
    " --checkpoints CHECKPOINTS",
    "bench.model.adapters": "--shape tiny --turns 2 --checkpoints CHECKPOINTS",
    "bench.model.formats": "--model-id CHECKPOINTS/tgi-trio-tiny --texts 1 --words q4_0",
    "bench.model.int8_quality": "--model-id CHECKPOINTS/tgi-trio-tiny --texts 1",
    "bench.model.sampler": "--batch 2 --vocab 2000 --spreads 1 --count 1",
    "bench.model.speculation": "--speculate 0 2 --batch 1 --new-tokens 8 --turns 1 --runs 1",
    "bench.model.threads": "--shapes tiny --repeats 1",
    "bench.ranks": "--rows 1 --count 2",
    "bench.ranks.stages": "--sequences 2 --tokens 4 --turns 1",
    "bench.schedule": "--rounds 5 --steps 200",
    "bench.schedule.copies": "--prompts 512 --streams 2 --cached 4096 --bus 6",
    "bench.schedule.policies": "--seconds 1 --profile chat",
    "bench.serve": "--concurrency 1 --requests 1 --max-tokens 4",
    "bench.serve.peers": "--checkpoints CHECKPOINTS --peers --shape tiny --clients 1 --requests 1"
    " --rounds 1",
    "bench.serve.stalls": "--tokens 2000 --requests 8 --blocks 64 --body 20000 --idle 4",
    "bench.step_gap": "--streams 1 --seconds 0.5",
    "bench.torch_step": "--folder CHECKPOINTS/tgi-trio-tiny --shape tiny --batches 1 --count 2",
    "bench.torch_step.families": "--families smollm3 --count 1",
    "bench.worker": "--rows 1 --kinds greedy grammar --steps 3 --turns 1",
    "tests.stress.chaos": "--faults 1 --clients 2",
    "tests.stress.company": "--seconds 0.1 --servers 'llama, kernels'",
    "tests.stress.fuzz": "--count 40",
    "tests.stress.interleavings": "--seeds 2",
    "tests.stress.restarts": "--times 1",
    "tests.stress.adapters": "--seconds 1 --adapters 8 --loaded 3",
    "tests.stress.soak": "--requests 50 --settle 0.1 --idle 0.1",
}
# What another test runs to its end: test_device.py has the kit do it, system/test_images.py has a
# model that sees.
RUN_ELSEWHERE = {"bench.device", "bench.images"}
# What prints figures for others, or what is wrong, and writes none.
WITHOUT_RESULTS = {
    "tests.stress.company",
    "tests.stress.interleavings",
    "bench.harness.checkpoints",
    "bench.machine.arithmetic",
    "bench.machine.bandwidth",
}
