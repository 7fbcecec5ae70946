"""A line for each request, chained by hashes and signed with a key: ``--audit``."""
