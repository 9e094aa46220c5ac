"""Other servers that run the same weights: how each is had, what it needs, how it is started."""
