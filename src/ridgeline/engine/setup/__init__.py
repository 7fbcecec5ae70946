"""From what was typed to a running engine. Nothing below imports it."""
