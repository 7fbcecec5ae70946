"""Inputs of kernels, made on the device: what is measured on a GPU, and tested without one."""
