"""The Open Inference Protocol (KServe's v2, Triton's): tensors in and out over the one path."""
