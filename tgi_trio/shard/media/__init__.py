"""What a model sees and hears: features that its towers compute, cached by content."""
