"""Trainers, losses and training data shared by all families."""
