"""The ladder: what a process records under its rung, and how the rungs of `trainwright ladder` compare."""
