"""Steps on a device that are launched before the last one is read."""
