"""The Trainer: the training loop and what surrounds it."""
