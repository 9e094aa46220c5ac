"""A small HTTP client for `chat` and `bench`: exact arrival times, little work per event."""
