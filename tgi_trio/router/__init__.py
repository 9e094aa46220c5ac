"""The router: one trio program that owns requests, queue, block tables and streams. Never torch."""
