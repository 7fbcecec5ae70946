"""How long a step takes: a model of time, its fit, and how far it is off."""
