"""What benchmarks share: summaries and tables, servers and their vital signs, checkpoints."""
