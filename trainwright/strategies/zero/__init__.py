"""deepspeed: a share of the optimizer state, gradients or parameters on every rank, by DeepSpeed's ZeRO."""
