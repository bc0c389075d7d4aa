"""Data: whose samples are whose (loaders.py, index_stream.py), seeds (seeding.py), and the way to the device (transfer.py)."""
