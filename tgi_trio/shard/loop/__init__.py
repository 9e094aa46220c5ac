"""The shard's loop: drain commands, plan a step over the running batch, run it, report."""
