"""``python -m bench cost``: what a forward pass costs here, and predictions from it."""
