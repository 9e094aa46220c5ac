"""What it costs to tell another rank of a step."""
