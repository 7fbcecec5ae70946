"""Which modules of a model a format converts, and which it keeps wider."""
