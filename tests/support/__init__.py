"""What tests share: checkpoints in others' formats, recorded processes, guards against hangs."""
