"""``python -m bench train``: make a checkpoint for a method."""
