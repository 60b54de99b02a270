"""The key/value cache: static buffers, one length per row.

Rows commit different numbers of tokens per round. A pass writes the M nodes it scores after each row's length without
moving the length; ``keep`` then packs the kept path together and moves it. Slots after the length are never visible to
a later pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.host_copies import from_host


class Cache:
    """Keys and values of some layers for B rows of up to S tokens.

    Attributes:
        store: [L, B, S, 2 * K, d]: the K key heads of a slot, then its K value heads. In memory the slots of a head are
            side by side, as attention reads them: half the time of slots whose heads are side by side.
        length: [B] on the device; ``lengths`` mirrors it on the host, so that no pass has to ask.
        begin: slot at which the tokens of a row begin.
        sources: tokens of each row's source, which come before; None: there are none.
    """

    begin = 0
    sources: list[int] | None = None

    def __init__(
        self,
        layers: Sequence[int],
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.place = {layer: index for index, layer in enumerate(layers)}
        self.batch, self.capacity, self.kv_heads = batch, capacity, kv_heads
        heads_first = torch.zeros(len(layers), batch, 2 * kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.store = heads_first.transpose(2, 3)
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        self.lengths = [0] * batch
        self._rows = torch.arange(batch, device=device)

    @property
    def nbytes(self) -> int:
        return self.store.numel() * self.store.element_size()

    @property
    def written(self) -> list[int]:
        """Slots in use from ``begin`` on, per row."""
        return self.lengths

    @property
    def uniform(self) -> bool:
        """All rows hold the same number of tokens: slices do instead of gathers."""
        return min(self.lengths) == max(self.lengths)

    def slots(self, nodes: int) -> Int[Tensor, "B M"]:
        """Where the next ``nodes`` tokens of each row go."""
        return self.length[:, None] + torch.arange(nodes, device=self.length.device)

    def write(self, layer: int, new: Float[Tensor, "B M H d"], slots: Int[Tensor, "B M"] | None) -> None:
        """Put keys and values (H = 2K heads) of a pass after the lengths; ``slots`` None: rows are uniform."""
        buffer = self.store[self.place[layer]]
        if slots is None:
            start = self.lengths[0]
            buffer[:, start : start + new.shape[1]] = new
        else:
            buffer[self._rows[:, None], slots] = new

    def newest(self, layer: int, rows: Int[Tensor, "n"]) -> Float[Tensor, "n H d"]:
        """A copy of the keys and values that a pass over one node wrote after the lengths of some rows."""
        return self.store[self.place[layer]][rows, self.length[rows]]

    def put_newest(self, layer: int, rows: Int[Tensor, "n"], heads: Float[Tensor, "n H d"]) -> None:
        """Put such keys and values back."""
        self.store[self.place[layer]][rows, self.length[rows]] = heads

    def view(self, layer: int, end: int) -> tuple[Float[Tensor, "B K S d"], Float[Tensor, "B K S d"]]:
        """Keys and values of the first ``end`` slots, without a copy."""
        kept = self.store[self.place[layer]][:, :end].transpose(1, 2)
        return kept[:, : self.kv_heads], kept[:, self.kv_heads :]

    def pack(self, path: Int[Tensor, "B P"]) -> None:
        """Move the kept draft nodes of the last pass together after its root (draft columns, -1: none).

        Columns on a path increase, so a source slot is never before its destination; the gather copies first. A chain
        needs no packing.
        """
        after_root = self.length[:, None] + 1
        target = after_root + torch.arange(path.shape[1], device=path.device)
        source = torch.where(path >= 0, after_root + path, target)
        rows = self._rows[:, None]
        self.store[:, rows, target] = self.store[:, rows, source]

    def pack_row(self, columns: Sequence[int]) -> None:
        """``pack`` of a cache of one row whose path is known on the host; what is at its place already stays there."""
        moved = next((place for place, column in enumerate(columns) if place != column), len(columns))
        if moved < len(columns):
            after_root = self.ends(self.lengths)[0] + 1
            source = from_host([after_root + column for column in columns[moved:]], self.length.device)
            self.store[:, :, after_root + moved : after_root + len(columns)] = self.store.index_select(2, source)

    def advance(self, counts: Sequence[int]) -> None:
        """Make the next ``counts[b]`` slots of each row part of it."""
        self.advanced(counts)
        first = counts[0]
        equal = all(count == first for count in counts)
        self.length += first if equal else from_host(counts, self.length.device)

    def advanced(self, counts: Sequence[int]) -> None:
        """Note what the lengths on the device have grown by already."""
        self._mirror([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the slots after ``lengths[b]`` tokens of each row."""
        self.set_lengths([min(now, new) for now, new in zip(self.lengths, lengths, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, one of them several times if it is named several times."""
        self.store = self.store.transpose(2, 3)[:, list(rows)].transpose(2, 3)
        self.batch, self._rows = len(rows), torch.arange(len(rows), device=self.length.device)
        self.length = torch.zeros_like(self._rows)
        self.set_lengths([self.lengths[row] for row in rows])

    def reorder(self, rows: Int[Tensor, "B"], start: int) -> None:
        """Row b takes what row ``rows[b]`` has from slot ``start`` on; the two are equally long and equal before it."""
        end = max(self.lengths)
        self.store[:, :, start:end] = self.store[:, rows, start:end]

    def adopt(self, rows: Sequence[int], other: Cache) -> None:
        """Replace the content of ``rows`` by that of ``other``, row for row."""
        width = max(other.lengths)
        self.store[:, list(rows), :width] = other.store[:, :, :width]
        self._replace_lengths(rows, other.lengths)

    def snapshot(self, tokens: int) -> Cache:
        """A copy of the first ``tokens`` of its rows, for ``continue_from``."""
        taken = copy(self)
        taken.store = self.store[:, :, :tokens].clone()
        return taken

    def continue_from(self, other: Cache, tokens: int) -> None:
        """Hold the first ``tokens`` of another cache, which may be this one; both have one row."""
        if other.store is not self.store:
            self.store[:, :, :tokens] = other.store[:, :, :tokens]
        self.set_lengths([tokens])

    def _replace_lengths(self, rows: Sequence[int], new: Sequence[int]) -> None:
        lengths = dict(enumerate(self.lengths)) | dict(zip(rows, new, strict=True))
        self.set_lengths(list(lengths.values()))

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Declare the first ``lengths[b]`` slots of each row valid."""
        self._mirror(lengths)
        self.length.copy_(from_host(self.ends(self.lengths), self.length.device))

    def ends(self, lengths: Sequence[int]) -> Sequence[int]:
        """The slots at which rows of these lengths end."""
        return lengths

    def _mirror(self, lengths: Sequence[int]) -> None:
        most = max(self.ends(lengths))
        assert most <= self.capacity, f"cache of {self.capacity} slots asked to hold {most}"
        self.lengths = list(lengths)

    def reset(self) -> None:
        """Forget every row."""
        self.set_lengths([0] * self.batch)
