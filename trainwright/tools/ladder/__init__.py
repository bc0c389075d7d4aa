"""The ladder: runs a script under several rungs, and records and compares the runs."""
