"""Ridgeline beside llama.cpp, OpenVINO GenAI and vLLM: same weights, same shapes, one machine.

``python -m peers`` compares. ``python -m peers.host_cost`` and ``python -m peers.overhead`` say
what the engine's Python and the server cost.
"""
