"""llama.cpp's own API, as far as editors speak it: gaps (`/infill`)."""
