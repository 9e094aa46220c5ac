"""What this machine can do at best, memory and arithmetic: the floors of the others."""
