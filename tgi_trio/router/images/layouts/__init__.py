"""How the families of models write an image among a prompt's tokens: one file each, one table."""
