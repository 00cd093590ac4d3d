"""How much memory a model will take, before it is run."""
