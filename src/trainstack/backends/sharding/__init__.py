"""What the layer `fsdp` needs: the units of a module, their gradients, and their states in checkpoints."""
