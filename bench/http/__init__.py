"""The HTTP front end alone, on tokens that are made up."""
