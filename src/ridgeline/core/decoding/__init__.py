"""Pure text and token logic above the core: what a result means. Standard library only."""
