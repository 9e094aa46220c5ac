"""The worker's own time a step on a device."""
