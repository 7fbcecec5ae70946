"""The families, a row each: see ``rows.row``. Literal tables."""
