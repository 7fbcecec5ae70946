"""What a start says of a model before its first answer."""
