"""What the processes of a job share: ranks, the process group, collectives, and the key-value store."""
