"""The command line: flags and variables as tables, and the commands beside `serve`."""
