"""From what a checkpoint holds to a runner, part by part; `torch_loading.py` is the way in."""
