"""Which devices hold a load, how many replicas of them, and at what cost."""
