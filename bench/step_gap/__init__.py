"""What passes between two steps: the worker loop with a model that only takes time."""
