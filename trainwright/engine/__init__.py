"""The Engine: strategy, precision and data of one job."""
