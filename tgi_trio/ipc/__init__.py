"""Bytes between processes: nameless segments, rings, doorbells, frames."""
