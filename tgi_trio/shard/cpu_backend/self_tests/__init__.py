"""Self-tests: kernels compared with numpy at every start, before they serve."""
