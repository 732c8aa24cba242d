"""FLOPs, memory and traffic of a model, by condition."""
