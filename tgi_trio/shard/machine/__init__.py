"""What the machine has: cores, memory, devices, thread pools, and how large the KV cache may be."""
