"""Faults: hanging ranks, values that are not finite, and remote calls that fail."""
