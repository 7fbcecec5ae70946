"""The APIs that clients know, each as names over one path."""
