"""What a start of the server checks, decides, measures and prints."""
