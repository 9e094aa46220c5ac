"""Compiles kernels in parallel before they are launched, in processes of their own."""
