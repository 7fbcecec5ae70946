"""A step on the device: arrays, one copy, graphs, draws, and the step after it."""
