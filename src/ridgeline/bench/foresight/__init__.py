"""How far predictions are off."""
