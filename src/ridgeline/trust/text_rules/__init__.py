"""Rules on a text that grows: nothing that a rule forbids becomes final."""
