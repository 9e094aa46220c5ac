"""GGUF, the files of llama.cpp: what their headers say, in the words of a model folder."""
