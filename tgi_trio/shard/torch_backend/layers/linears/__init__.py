"""Linear layers, by how weights are stored: plain, rounded, codes, EXL3's trellis."""
