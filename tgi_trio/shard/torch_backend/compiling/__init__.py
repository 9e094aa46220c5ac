"""Kernels compiled beside one another before they are launched, by processes of their own."""
