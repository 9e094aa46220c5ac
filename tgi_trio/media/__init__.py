"""What models see and hear becomes numbers, in processes of their own that may die of it."""
