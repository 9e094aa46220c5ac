"""What bodies say: request schemas, replies, server-sent events, errors, and the OpenAPI document
of all of them.
"""
