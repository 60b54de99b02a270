"""SpecDec: a non-autoregressive drafter trained for its target (Spec-Drafter). Start with decoder.py."""
