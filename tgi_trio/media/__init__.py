"""Images become pixels: in processes of their own, which may die of what they are given."""
