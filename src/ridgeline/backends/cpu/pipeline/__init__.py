"""A model whose layers are divided among processes, on one machine or several.

Each stage has some consecutive layers, with their keys and values. The last one is the engine's own
process, which draws; the others are told which tokens to compute, and never what is asked of them.
``split`` says which layers a stage has, ``parts`` divides a step so that all stages work at once,
``wire`` is what they say to each other, ``process`` what a stage runs, and ``runner`` the whole.
"""
