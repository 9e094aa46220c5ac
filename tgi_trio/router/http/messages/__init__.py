"""HTTP bodies: request schemas, replies, server-sent events and errors."""
