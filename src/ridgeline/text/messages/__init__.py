"""An assistant's message as it is written: reasoning, text, calls of tools."""
