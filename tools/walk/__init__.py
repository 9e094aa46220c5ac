"""Which files one request goes through, from the socket to the processor and back.

`python -m tools.walk` serves the embedded model, asks for one greedy stream and lists every file of
the package in which a function was called meanwhile, in order of the first call, router and shard
together. docs/architecture.md tells the same walk; a test holds it to this list.
"""
