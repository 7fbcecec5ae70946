"""Kernels, written as LLVM IR from Python. The only place that imports llvmlite."""
