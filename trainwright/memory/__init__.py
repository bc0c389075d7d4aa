"""Memory: estimates, activations that are recomputed, and reports of errors of too little memory."""
