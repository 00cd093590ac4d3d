"""Memory: running out of it together, giving it back, and saying where it went."""
