"""The cuda backend: steps on an NVIDIA GPU, with torch and Triton."""
