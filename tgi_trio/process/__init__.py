"""What a process has of its machine: signals, threads, stacks, memory, descriptors, sockets."""
