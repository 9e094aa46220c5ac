"""HTTP on a socket: connections, HTTP/1.1, HTTP/2 through hypercorn, TLS and Unix sockets. No
route, no schema.
"""
