"""What a model looks like: layers, mixers, rotations, groups of layers that share a cache. Pure."""
