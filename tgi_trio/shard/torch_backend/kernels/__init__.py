"""Our own kernels for devices, in Triton: imported only where Triton is installed."""
