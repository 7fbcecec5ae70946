"""The highest load that meets service levels: ``ridgeline bench search``."""
