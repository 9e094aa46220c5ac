"""A model's thoughts before its answer: the marks around them, and where they begin."""
