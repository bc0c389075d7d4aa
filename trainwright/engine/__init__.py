"""The Engine (strategy, precision and data of one job), and the Accelerator: its API for a loop that users write."""
