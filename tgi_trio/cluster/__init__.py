"""Beyond one machine: a front that spreads requests over replicas of the server."""
