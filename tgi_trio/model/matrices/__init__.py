"""A decoder's matrices and other tensors: names, shapes, and how ranks split them."""
