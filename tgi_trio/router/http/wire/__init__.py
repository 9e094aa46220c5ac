"""HTTP on sockets: connections, HTTP/1.1, HTTP/2 (by hypercorn), TLS and Unix sockets.

No routes, no schemas.
"""
