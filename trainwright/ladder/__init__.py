"""The ladder: what a process records under its rung, and what the rungs of `trainwright ladder` come to together."""
