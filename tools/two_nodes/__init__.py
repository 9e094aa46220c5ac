"""A Ray cluster of two nodes on this machine, with servers kept on it: to try `cluster` out."""
