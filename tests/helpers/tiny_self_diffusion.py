"""Tiny targets that say that they can fill in blocks of masks."""

from __future__ import annotations

from typing import Any

from methods.speculative.self_diffusion import BLOCK, MASK


def with_masks(target: Any, block: int = 3, mask: int = 0) -> Any:
    """The same target; it was not trained for it, so its drafts are kept by chance."""
    setattr(target.config, BLOCK, block)
    setattr(target.config, MASK, mask)
    return target
