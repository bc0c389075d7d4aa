"""Checkpoints: directories of safetensors and JSON files that commit whole or not at all, with no pickle in them."""
