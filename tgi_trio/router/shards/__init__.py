"""Shard processes from the router's side: spawn, handshake, supervision, restarts."""
