"""What the server can be told: options, checks, what they resolve to, and how they are shown."""
