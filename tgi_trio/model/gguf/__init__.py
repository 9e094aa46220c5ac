"""GGUF, the file format of llama.cpp: its headers, translated into a model folder's terms."""
