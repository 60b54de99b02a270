"""Load a target or draft model by name, and find trained checkpoints."""
