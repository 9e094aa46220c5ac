"""How a model knows where a token is, for every backend: rotations, sines, biases of attention."""
