"""ddp_sharded: a whole model on every rank and a share of the optimizer state, by FairScale."""
