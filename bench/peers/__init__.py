"""Ridgeline beside llama.cpp, OpenVINO GenAI and vLLM: same weights, same shapes, one machine."""
