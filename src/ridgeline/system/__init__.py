"""This machine: its memory and cores, its files, and what is drawn and printed on it."""
