"""The command line: serve (default) and download-weights."""
