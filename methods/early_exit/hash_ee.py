"""HASH-EE: the token that is read decides the depth of its step (Sun et al. 2022, arXiv 2203.01670).

A fixed table gives each token id a depth: one output matrix per step, no classifier, no threshold. The depth of a step
is known before it begins, so an accelerator never waits between layers. Later layers see the state with which a token
exited, each by its own projections (``loop.py``). ``hash_tables.py`` makes the tables: random, by frequency, by mutual
information, by clusters.

    python -m bench train method=hash_ee model=MODEL train.kind=frequency

The paper trains the model with the table it decodes with, which gives the quality: on a model not trained so, a table
is no better than a static exit.

Differences: the released code classifies and does not generate. Here the token that is read decides, end-of-sequence
and unseen tokens take the whole model, and prompts are read in full unless ``prompt=hash``. Rows and positions are
masked, never compacted.

With ``method.calibration.tolerance`` a least depth is chosen, to which shallower entries of the table are raised; its
share of the layers is what other methods call a threshold.

Command: ``python -m bench method=hash_ee``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.decoder import Calibrated, Guarantee
from methods.drafting import AcceptanceRule
from methods.early_exit.calibrator import RiskTarget
from methods.early_exit.exits import NAMES, Head, find_exits, find_reader, require_depths
from methods.early_exit.hash_tables import HashTable
from methods.early_exit.loop import ExitDecision, ExitPoint, Policy, exact_if
from methods.early_exit.rounds import RoundsDecoder
from methods.early_exit.verified import Judged, verification
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import part_folder
from methods.engine.fused_layers import ExitRule
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM

Prompt = Literal["full", "hash"]

_CHUNK = 512
_IN_LAYERS = "method.calibration.thresholds, in layers"


class HashPolicy(Policy):
    """Exit at the depth that the table has for the token that is read."""

    def __init__(self, table: HashTable) -> None:
        self._depths: list[int] = table.depths.tolist()
        self._numbers = torch.from_numpy(table.depths.astype(np.int32))
        self._stops = sorted(set(self._depths))
        self.deepest = max(self._depths)
        self.guarantee = exact_if(min(self._depths) == table.layers)
        self.nbytes = 8 * len(self._depths)

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        return sorted({self._depths[token] for token in roots})

    def rule(self, roots: Sequence[int], places: Sequence[int]) -> ExitRule | None:
        depths = [self._depths[token] for token in roots]
        return ExitRule(sorted(set(depths)), "table", depths=depths)

    def rule_of_rounds(self, places: Sequence[int], rounds: int) -> ExitRule | None:
        return ExitRule(self._stops, "table", table=self._numbers)

    def decide(self, point: ExitPoint) -> ExitDecision:
        """Known on the host, without a read back."""
        return ExitDecision([self._depths[token] == point.depth for token in point.roots])


class HashEE(RoundsDecoder, Calibrated):
    """Early exit by a table of tokens.

    Args:
        prompt: read prompts by the whole model, or each of their tokens by its own depth.
        head: how exits are read: by trained maps, or by the model's own norm and output matrix (``lens``).
        regroup: in a batch, rows wait at the depths of the table until so many are there; None: all rows take
            a step together.
        accept: ``all`` tokens that exit, or ``verify`` them by the whole model, see ``verified.py``.
        rule: exact rule of ``verify``; None: keep a token while the whole model picks it too.
        max_pending: most tokens that wait to be verified.
        calibration: a risk target for which the least depth is chosen.
        checkpoint: folder of a table; None: the one prepared for this model.

    Attributes:
        table: as it is used.
        checksum: of the table as it was made.

    Raises:
        ValueError: no table, one of another model, untrained exits, or ``prompt=hash`` for an encoder-decoder.
    """

    paper = "Sun et al. 2022, arXiv 2203.01670"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        prompt: Prompt = "full",
        head: Head = "trained",
        regroup: int | None = None,
        accept: Judged = "all",
        rule: AcceptanceRule | None = None,
        max_pending: int = 16,
        calibration: RiskTarget | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        if prompt == "hash" and isinstance(target, Seq2SeqLM):
            raise ValueError(
                f"method.prompt must be full for {target.name}, an encoder-decoder whose encoder reads the prompt, got "
                "hash. Set method.prompt=full."
            )
        folder, self.table = _table(target, checkpoint)
        self.checksum = self.table.checksum
        exact = HashPolicy(self.table).guarantee is Guarantee.EXACT
        exits = None if exact or not (folder / NAMES[1]).exists() else find_exits(target, folder)
        reader = find_reader("hash_ee", "lens" if exact else head, target, exits)
        require_depths(np.unique(self.table.depths).tolist(), target, reader, "the depths of the table", last=True)
        self._made, self._hashes_prompts = self.table, prompt == "hash"
        shares = [depth / target.n_layers for depth in np.unique(self.table.depths)[::-1].tolist()]
        grid = [share for share in shares if share < 1]
        self.calibrator = None if calibration is None else calibration.over(grid, sampling)
        verify = verification(accept, rule, max_pending, sampling, self.calibrator is not None)
        if verify is not None and self._hashes_prompts:
            raise ValueError(
                "method.prompt must be full with accept=verify, whose text is that of the whole model, got hash. Set "
                "method.prompt=full, or method.accept=all."
            )
        super().__init__(target, sampling, HashPolicy(self.table), reader, verify, regroup)

    @classmethod
    def needs_checkpoint(cls, settings: Mapping[str, Any]) -> bool:
        """The table is needed, whatever reads the exits."""
        return settings.get("checkpoint") is None

    def set_threshold(self, threshold: float) -> None:
        """See ``methods.decoder.Calibrated``; a share of the layers."""
        least = round(threshold * self.target.n_layers)
        self.table = replace(self._made, depths=np.maximum(self._made.depths, least))
        require_depths(np.unique(self.table.depths).tolist(), self.target, self.reader, _IN_LAYERS, last=True)
        self.restart(HashPolicy(self.table))

    def stats(self) -> dict[str, Any]:
        """Cost of the steps so far, and the table."""
        table = {"table": self._made.facts, "table_sha256": self.checksum, "least_depth": int(self.table.depths.min())}
        return super().stats() | table | {"confidence_share": 0.0}

    @property
    def prompt_depth(self) -> int:
        return self.policy.deepest if self._hashes_prompts else self.target.n_layers

    def read_prompts(self, prompts: Sequence[Int[Tensor, "_"]], cache: Cache) -> Float[Tensor, "B V"]:
        """With ``prompt=hash`` each token runs its own layers, and the last one of a prompt is read at its own exit."""
        if not self._hashes_prompts:
            return super().read_prompts(prompts, cache)
        target, lengths = self.target, [len(prompt) for prompt in prompts]
        rows = [prompt.to(target.device) for prompt in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        last = torch.tensor(lengths, device=target.device) - 1
        final = torch.empty(len(rows), target.hidden_size, dtype=target.dtype, device=target.device)
        by_id = torch.from_numpy(self.table.depths.astype(np.int64)).to(target.device)
        cache.reset()
        for start in range(0, tokens.shape[1], _CHUNK):
            part = tokens[:, start : start + _CHUNK]
            hidden = frozen_pass(target, part, by_id[part], cache, [self.policy.deepest])[self.policy.deepest]
            here = (last >= start) & (last < start + part.shape[1])
            place = (last - start).clamp(0, part.shape[1] - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            final = torch.where(here[:, None], hidden.gather(1, place)[:, 0], final)
            cache.advance([part.shape[1]] * len(rows))
        cache.set_lengths(lengths)
        ready = torch.empty_like(final)
        for row, prompt in enumerate(prompts):
            depth = int(self.table.depths[int(prompt[-1])])
            ready[row] = self.reader.read(depth, final[row : row + 1])[0]
        return target.head(ready)


def frozen_pass(
    target: CausalLM, tokens: Int[Tensor, "B T"], wanted: Int[Tensor, "B T"], cache: Any, depths: Sequence[int]
) -> dict[int, Float[Tensor, "B T D"]]:
    """Run all tokens through all layers; a layer changes only the states of tokens that take it.

    Args:
        wanted: layers that each token takes.
        depths: after which states are returned.
    """
    state, found = target.begin(tokens, None, cache), {}
    for layer in range(max(depths)):
        before = state.hidden
        target.run(state, (layer,))
        state.hidden = torch.where(wanted[:, :, None] > layer, state.hidden, before)
        if layer + 1 in depths:
            found[layer + 1] = state.hidden
    return found


def _table(target: CausalLM, checkpoint: str | Path | None) -> tuple[Path, HashTable]:
    folder = part_folder("hash_ee", "table", checkpoint)
    table = HashTable.load(folder)
    if (len(table.depths), table.layers) != (target.vocab_size, target.n_layers):
        raise ValueError(
            f"The table in {folder} must fit {target.name}, with {target.vocab_size} tokens and {target.n_layers} "
            f"layers, got {len(table.depths)} tokens and {table.layers} layers. Make one: python -m bench train "
            "method=hash_ee model=MODEL force=true."
        )
    return folder, table
