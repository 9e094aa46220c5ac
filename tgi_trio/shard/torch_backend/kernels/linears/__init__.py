"""Products with a matrix: of few rows, several or any, of codes and of EXL3's trellis."""
