"""The parts, a module each, with a function ``measure``."""
