"""Talking to other ranks: structures, objects, agreement, random state."""
