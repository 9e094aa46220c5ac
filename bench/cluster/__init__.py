"""Beyond one machine: what a front adds, and where requests go among thousands of replicas."""
