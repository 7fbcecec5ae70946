"""A model on several GPUs, each of which has a part of all outputs.

``share`` says which rows of which tensor a rank has, and ``group`` puts the outputs of all ranks
side by side. ``processes`` runs them.
"""
