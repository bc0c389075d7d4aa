"""The raw loop: the Accelerator, and other tools for a training loop that users write."""
