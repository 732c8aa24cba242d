"""One training step: meshes, forward and backward passes, gradients, optimizer, guard."""
