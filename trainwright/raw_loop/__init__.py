"""The raw loop: the Accelerator, and what a training loop that users write takes with it."""
