"""What some requests cost the others: a long prompt, guided generation."""
