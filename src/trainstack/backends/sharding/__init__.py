"""Sharding for the layer `fsdp`: the units of a module, their gradients, and their states in checkpoints."""
