"""The server's settings: options, checks, resolved values, and how they are shown."""
