"""ddp: a whole model on every rank, whose gradients torch averages in the backward."""
