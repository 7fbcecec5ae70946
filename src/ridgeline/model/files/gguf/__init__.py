"""GGUF files: their parts, their tensors, and the tokenizer that their metadata describes."""
