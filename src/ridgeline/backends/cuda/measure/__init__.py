"""What ``ridgeline bench gpu`` runs: each part of it in a process of its own, by ``__main__``."""
