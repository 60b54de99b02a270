"""Extra output heads draft several positions at once: Medusa, Hydra, blockwise. Start with medusa.py."""
