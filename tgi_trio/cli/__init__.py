"""The command line: tables of flags and variables, and the commands besides `serve`."""
