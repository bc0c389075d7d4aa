"""Data: whose batches are whose (loaders.py, combined.py), seeds (seeding.py), the way to the device (transfer.py)."""
