"""What this machine can do, and what a step did: roofs, cycles, traffic."""
