"""A model on the device: its weights, its blocks of keys and values, its layers as calls."""
