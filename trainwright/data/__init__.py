"""Data: sharding batches over ranks (loaders.py, combined.py), seeding (seeding.py), transfer to the device (transfer.py)."""
