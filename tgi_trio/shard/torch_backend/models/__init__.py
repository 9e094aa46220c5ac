"""The generic decoder, the families it covers, and the fallback for everything else."""
