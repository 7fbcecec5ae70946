"""``ridgeline bench claims``: what the field's techniques bring on one's own machine."""
