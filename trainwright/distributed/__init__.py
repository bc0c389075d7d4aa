"""Distributed: ranks, the process group, its collectives, and the key-value store of a job."""
