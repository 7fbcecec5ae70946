"""What each key may ask, and what may be read and written: the file of ``--rules``."""
