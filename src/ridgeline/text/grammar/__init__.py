"""Forms that an answer must have: grammars, compiled in a process of their own."""
