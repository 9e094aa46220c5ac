"""`quantize`: writes a model with weights of fewer bits, by GPTQ, or rounded into a GGUF file."""
