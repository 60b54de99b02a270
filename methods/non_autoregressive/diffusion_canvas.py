"""The text a diffusion model works on: prompts of any lengths, masks after them, and the current block.

Positions of a row count from the beginning of its prompt. The geometry is on the host, the tokens are on the device;
one read per pass tells whether masks are left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from methods.engine.masked_lm import MaskedLM


class Canvas:
    """Prompts and answers of a batch.

    Attributes:
        tokens: [B, S] prompt, answer or masks; undefined after the canvas of a row.
        totals: per row, positions of prompt and answer.
        origins: per row, where its first block begins; within the prompt where blocks are counted from there.
        block_origins, block_starts, block_ends: per row, of the current block: where it begins, where its part to be
            filled in begins, and the position after it. A row that has no further block stays at its last.
        unwritten: per row, where the block before this one begins, 0 for the first: an exact cache is final up to here.
        n_blocks: of the row that has most.
        capacity: slots that passes over the canvas write at most.
        masked: whether the block has masks left.
    """

    def __init__(self, target: MaskedLM, prompts: Sequence[Int[Tensor, "_"]], limit: int, block_size: int) -> None:
        denoising, self._size = target.denoising, block_size
        self._mask_id = denoising.mask_id
        self._prompts = [len(prompt) for prompt in prompts]
        inside = denoising.block_causal and denoising.blocks_from == "text"
        self.origins = [n - n % block_size if inside else n for n in self._prompts]
        spans = [n + limit - origin for n, origin in zip(self._prompts, self.origins, strict=True)]
        self._last = [-(-span // block_size) - 1 for span in spans]
        self.n_blocks = max(self._last) + 1
        whole = [origin + (last + 1) * block_size for origin, last in zip(self.origins, self._last, strict=True)]
        self.totals = whole if denoising.block_causal else [n + limit for n in self._prompts]
        # where attention ends with the block, a row whose pass is shorter than another's writes on after it
        self.capacity = max(self.totals) + (2 * block_size + 1) * denoising.block_causal
        self.tokens = torch.zeros(len(prompts), self.capacity, dtype=torch.long, device=target.device)
        for row, (prompt, total) in enumerate(zip(prompts, self.totals, strict=True)):
            self.tokens[row, : len(prompt)] = prompt
            self.tokens[row, len(prompt) : total] = self._mask_id
        self._taken = list(self._prompts)
        self.open(0)

    def open(self, block: int) -> None:
        """Turn to a block."""
        numbers = [min(block, last) for last in self._last]
        self.block_origins = [o + n * self._size for o, n in zip(self.origins, numbers, strict=True)]
        befores = [begin - self._size for begin in self.block_origins]
        self.unwritten = [before if n else 0 for n, before in zip(numbers, befores, strict=True)]
        self.block_starts = [max(n, begin) for n, begin in zip(self._prompts, self.block_origins, strict=True)]
        self.block_ends = [min(begin + self._size, t) for begin, t in zip(self.block_origins, self.totals, strict=True)]
        widths = [end - start for start, end in zip(self.block_starts, self.block_ends, strict=True)]
        offsets = torch.arange(max(widths), device=self.tokens.device)
        self._inside = offsets < self._column(widths)
        self._places = self._column(self.block_starts) + offsets
        self._read()

    def nodes(self, starts: Sequence[int], stops: Sequence[int]) -> Int[Tensor, "B M"]:
        """Input of a pass: per row the tokens from a position to another, all as many as the longest."""
        count = max(stop - start for start, stop in zip(starts, stops, strict=True))
        places = self._column(starts) + torch.arange(count, device=self.tokens.device)
        return self.tokens.gather(1, places)

    def columns(self, starts: Sequence[int]) -> Int[Tensor, "B W"]:
        """Columns of the block in a pass from these positions on; a shorter one is padded with its last position."""
        return torch.minimum(self._places, self._column(self.block_ends) - 1) - self._column(starts)

    def open_masks(self) -> Bool[Tensor, "B W"]:
        """Which places of the block are still masked."""
        return self._inside & (self.tokens.gather(1, self._places) == self._mask_id)

    def fill(self, tokens: Int[Tensor, "B W"], kept: Bool[Tensor, "B W"]) -> None:
        """Write the kept tokens into the block."""
        before = self.tokens.gather(1, self._places)
        self.tokens.scatter_(1, self._places, torch.where(kept, tokens, before))
        self._read()

    def take(self) -> list[list[int]]:
        """Tokens of the block, for rows from which it was not taken yet."""
        new = []
        for row, (start, end) in enumerate(zip(self.block_starts, self.block_ends, strict=True)):
            new.append(self._rows[row] if self._taken[row] == start else [])
            self._taken[row] = end
        return new

    def _read(self) -> None:
        rows: list[list[int]] = self.tokens.gather(1, self._places).tolist()
        widths = [end - start for start, end in zip(self.block_starts, self.block_ends, strict=True)]
        self._rows = [row[:width] for row, width in zip(rows, widths, strict=True)]
        self.masked = any(self._mask_id in row for row in self._rows)

    def _column(self, rows: Sequence[int]) -> Int[Tensor, "B 1"]:
        return torch.tensor(rows, device=self.tokens.device)[:, None]
