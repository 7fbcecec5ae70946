"""Several models behind one address: each in a process of its own, loaded when it is asked for."""
