"""The families, a row each: see ``inherit.row``. Literal tables."""
