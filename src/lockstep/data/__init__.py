"""Loaders that share their data between ranks."""
