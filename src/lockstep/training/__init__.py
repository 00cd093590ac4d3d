"""What a script trains with: models, optimizers, schedulers and loaders made ready."""
