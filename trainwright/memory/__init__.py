"""Memory: estimates, activations that are recomputed, and reports of out-of-memory errors."""
