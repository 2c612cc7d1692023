"""The fixed maps, one a file."""
