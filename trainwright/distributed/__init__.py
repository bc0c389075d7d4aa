"""What the processes of a job share: their places, the process group, collectives, and agreement over the store."""
