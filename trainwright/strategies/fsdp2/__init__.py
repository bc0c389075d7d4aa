"""fsdp: a share of the parameters on every rank, by torch's `fully_shard`."""
