"""What drafts tokens on a CPU: heads, and layers behind the model."""
