"""What an answer shows, read from a file that anybody may have written, in the form of each API."""
