"""Models over the network: indexes, repositories, downloads that are checked."""
