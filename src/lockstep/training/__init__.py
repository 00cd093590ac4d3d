"""Training with prepared objects: their state, preparing them, and what happens in a step."""
