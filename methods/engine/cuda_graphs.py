"""Passes of fixed shape as CUDA graphs: one launch for all kernels of all layers.

A small model's kernels are shorter than the time to launch them, so a pass that is launched kernel by kernel measures
the host. A graph needs the same addresses and shapes each time: caches are handed out from a pool, nodes go into fixed
buffers, and keys are read up to a bucket above the longest row, those after each row's end masked. What was captured
over one cache is replayed for all texts that use it.

Triton's kernels (``methods.engine.triton_layers``) read where rows end on the device, so that one graph of a number of
nodes is enough for all lengths.

Passes over other numbers of nodes than those of ``NODES`` are filled up to the next one: nodes after the last are read
by none before them. The output matrix is multiplied outside, so the next pass does not overwrite logits and states.

A shape is captured at its second use; before, and where nothing fits, a pass runs kernel by kernel. ``prepare``
captures all that a run may need before its clock starts, and nothing is captured after it. ``capture=False`` runs the
same fixed form without a graph, for comparison in tests.

A graph is of one batch size, so finished rows stay in the batch: without them each pass would need other graphs, which
would be captured while the decode is timed, or run kernel by kernel.
"""

from __future__ import annotations

import copy
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from methods.engine.causal_lm import CausalLM, States
from methods.engine.kv_cache import Cache
from methods.engine.token_tree import Nodes, Parents, closure_steps

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # of a pass; larger ones are as they are
_LEAST_BUCKET = 128
_MOST_GRAPHS = 256  # of one pooled cache
_MOST_CACHES = 8  # that are kept with their graphs
_COMES_AGAIN = 2  # a shape is captured when it comes for this time
_WARM_UPS = 2  # libraries choose kernels and allocate work space in the first passes


class Form(NamedTuple):
    """What distinguishes the graphs over one cache.

    Attributes:
        nodes: M, one of ``NODES`` or more.
        closure: products that the tree's closure takes (``tree.closure_steps``); None: a chain.
        end: slots that attention reads, a bucket; all that the cache has where kernels find the rows' ends.
        hidden_layers: layers whose states are wanted.
    """

    nodes: int
    closure: int | None
    end: int
    hidden_layers: tuple[int, ...]


class Replay(NamedTuple):
    """A captured pass: input buffers, the replay, the results, and the other tensors it reads."""

    tokens: Int[Tensor, "B M"]
    parents: Parents
    run: Callable[[], None]
    states: States
    tables: tuple[Tensor, ...]  # a longer table takes the place of the model's, not of these


@dataclass
class Pooled:
    """A cache whose tensors keep their addresses, and what was captured over it.

    Attributes:
        cache: owner of the tensors; decoders get handles that share them and have lengths of their own.
        handle: the one in use, if it is alive.
        seen: how often each form was used before it was captured.
        memory, stream: of its graphs, which are made and released together. An allocator's pool takes no further
            capture once all its graphs are gone (torch 2.11: INTERNAL ASSERT use_count > 0), and later versions release
            cuBLAS' work space together with the last graph of a stream; so neither is shared between caches.
    """

    cache: Cache
    handle: weakref.ref[Cache] | None = None
    seen: dict[Form, int] = field(default_factory=dict)
    replays: dict[Form, Replay] = field(default_factory=dict)
    memory: Any = None
    stream: Any = None

    @property
    def in_use(self) -> bool:
        return self.handle is not None and self.handle() is not None

    def fits(self, batch: int, capacity: int) -> bool:
        return not self.in_use and self.cache.batch == batch and self.cache.capacity >= capacity

    def hand_out(self) -> Cache:
        handle = copy.copy(self.cache)
        handle.reset()
        self.handle = weakref.ref(handle)
        return handle


class Graphs:
    """The graphs of one model, or of one view of it.

    Args:
        lm: whose passes are captured.
        capture: see ``GraphedLM.of``.

    Attributes:
        captured: number of graphs made.
        seconds: time that making them took.
        missed: passes without a graph since ``prepare``.
    """

    def __init__(self, lm: CausalLM, capture: bool = True) -> None:
        assert not capture or lm.device.type == "cuda", "only CUDA has graphs"
        self._lm, self.capture = weakref.ref(lm), capture
        self._pooled: list[Pooled] = []
        self._shapes: dict[tuple[int | None, tuple[int, ...]], int] = {}  # closure and taps of passes: their most nodes
        self._prepared = False
        self.captured, self.seconds, self.missed = 0, 0.0, 0

    def new_cache(self, batch: int, capacity: int, make: Callable[[int, int], Cache]) -> Cache:
        """An empty cache: a free one of that size from the pool, else a new one by ``make``."""
        return self._cache(batch, capacity, make).hand_out()

    def _cache(self, batch: int, capacity: int, make: Callable[[int, int], Cache]) -> Pooled:
        for pooled in self._pooled:
            if pooled.fits(batch, capacity):
                return pooled
        kept = [pooled for pooled in self._pooled if pooled.in_use or pooled.cache.batch != batch]
        own = (torch.cuda.graph_pool_handle(), torch.cuda.Stream()) if self.capture else (None, None)
        with torch.inference_mode(False):  # a cache made within it could not be used outside of it
            made = Pooled(make(batch, bucket(capacity)), memory=own[0], stream=own[1])
        self._pooled = [*kept[-_MOST_CACHES:], made]
        return made

    def prepare(self, longest: Mapping[int, int], make: Callable[[int, int], Cache]) -> None:
        """Capture every pass that rows up to a length may need, by the passes seen so far; nothing is captured later.

        Args:
            longest: by batch size, tokens of the longest row at its end.
            make: a cache of a batch size and a capacity.
        """
        most = max(self._shapes.values(), default=1)
        for batch, length in longest.items():
            pooled = self._cache(batch, length + 2 * padded(most), make)
            with torch.inference_mode():
                pooled.cache.reset()
                for form in self._forms(pooled.cache.capacity, length):
                    if form not in pooled.replays and len(pooled.replays) < _MOST_GRAPHS:
                        tokens = torch.zeros(batch, form.nodes, dtype=torch.long, device=pooled.cache.length.device)
                        parents = None if form.closure is None else torch.full_like(tokens[:, 1:], -1)
                        self._make(pooled, form, tokens, parents)
        self._prepared, self.missed = True, 0

    def _forms(self, capacity: int, longest: int) -> Iterator[Form]:
        """Of the passes seen so far, smaller ones and those without a draft, over rows up to a length."""
        undrafted: dict[tuple[int | None, tuple[int, ...]], int] = {(None, taps): 1 for _, taps in self._shapes}
        for (closure, taps), most in (undrafted | self._shapes).items():
            sizes = {padded(most), *(nodes for nodes in NODES if nodes <= most and (closure is None or nodes > 1))}
            for nodes in sorted(sizes):
                if self._reads_lengths(nodes):
                    yield Form(nodes, closure, capacity, taps)
                    continue
                end, last = _LEAST_BUCKET, min(bucket(longest + nodes), capacity)
                while end <= last:
                    yield Form(nodes, closure, end, taps)
                    end = bucket(end + 1)

    def states(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None, hidden_layers: Collection[int]
    ) -> States | None:
        """Hidden states after all layers and after ``hidden_layers``; None where this pass has no fixed form (yet)."""
        pooled = next((known for known in self._pooled if known.cache.store is cache.store), None)
        given = tokens.shape[1]
        nodes = padded(given)
        least = max(cache.lengths) + nodes
        end = max(cache.capacity, least) if self._reads_lengths(nodes) else bucket(least)
        if pooled is None or end > cache.capacity or cache.length is not pooled.cache.length:
            self.missed += 1
            return None
        closure = None if parents is None else closure_steps(levels or given)
        form = Form(nodes, closure, end, tuple(sorted(hidden_layers)))
        shape = (form.closure, form.hidden_layers)
        self._shapes[shape] = max(given, self._shapes.get(shape, 0))
        replay = pooled.replays.get(form) or self._again(pooled, form, tokens, parents)
        if replay is None:
            self.missed += 1
            return None
        replay.tokens[:, :given].copy_(tokens)
        if replay.parents is not None and parents is not None:
            replay.parents[:, : given - 1].copy_(parents)
            replay.parents[:, given - 1 :].fill_(-1)
        replay.run()
        hidden, seen = replay.states
        return hidden[:, :given].clone(), {tap: state[:, :given].clone() for tap, state in seen.items()}

    def _reads_lengths(self, nodes: int) -> bool:
        lm = self._lm()
        return lm is not None and lm.reads_lengths(nodes)

    def _again(self, pooled: Pooled, form: Form, tokens: Nodes, parents: Parents) -> Replay | None:
        """A replay of a form that is used for the second time."""
        pooled.seen[form] = pooled.seen.get(form, 0) + 1
        if self._prepared or pooled.seen[form] < _COMES_AGAIN or len(pooled.replays) >= _MOST_GRAPHS:
            return None
        missing = (0, form.nodes - tokens.shape[1])
        above = None if parents is None else F.pad(parents, missing, value=-1)
        return self._make(pooled, form, F.pad(tokens, missing), above)

    def _make(self, pooled: Pooled, form: Form, tokens: Nodes, parents: Parents) -> Replay:
        began = time.perf_counter()
        lm = self._lm()
        assert lm is not None, "a model owns its graphs"
        tables = lm.reserve_positions(pooled.cache.capacity)
        own_tokens, own_parents = tokens.clone(), None if parents is None else parents.clone()
        levels = None if form.closure is None else 1 << form.closure

        def work() -> States:
            state = lm.begin(own_tokens, own_parents, pooled.cache, levels, end=form.end)
            seen = lm.run(state, range(lm.n_layers), form.hidden_layers)
            return state.hidden, seen

        run, states = self._recorded(work, pooled) if self.capture else _repeated(work)
        pooled.replays[form] = Replay(own_tokens, own_parents, run, states, tables)
        self.captured += 1
        self.seconds += time.perf_counter() - began
        return pooled.replays[form]

    def _recorded(self, work: Callable[[], States], pooled: Pooled) -> tuple[Callable[[], None], States]:
        """Capture ``work``; what it writes into the cache meanwhile is after the end of all rows.

        Warm-up and capture share a stream, so that cuBLAS takes its work space before, outside of the graphs' pool.
        """
        aside = pooled.stream
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pooled.memory, stream=aside):
            states = work()
        return graph.replay, states


class GraphedLM(CausalLM):
    """A model that replays passes of fixed shape as CUDA graphs. Build it with ``of``."""

    graphs: Graphs

    @classmethod
    def of(cls, lm: CausalLM, capture: bool = True) -> GraphedLM:
        """The same weights with graphs.

        Args:
            lm: the model.
            capture: make graphs; False: run their fixed form kernel by kernel, on any device.
        """
        view = object.__new__(cls)
        view.__dict__.update(lm.__dict__)
        view.graphs = Graphs(view, capture)
        _MODELS.add(view)
        return view

    def skip(self, attention: Collection[int] = (), mlp: Collection[int] = ()) -> CausalLM:
        """See ``CausalLM.skip``; the view has graphs of its own."""
        return GraphedLM.of(super().skip(attention, mlp), self.graphs.capture)

    def pays_to_drop(self, kept: int, rows: int) -> bool:
        """Never: graphs are of one batch size, and those of a smaller one would be captured during the decode."""
        return False

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """See ``CausalLM.new_cache``; one that is free is used again."""
        return self.graphs.new_cache(batch, capacity, self._make_cache)

    @staticmethod
    def prepare(longest: Mapping[int, int]) -> None:
        """Capture every pass that targets, drafts and their views may need after a warm-up, see ``Graphs.prepare``."""
        for model in list(_MODELS):
            model.graphs.prepare(longest, model._make_cache)

    def forward_layers(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None, hidden_layers: Collection[int]
    ) -> States:
        """See ``CausalLM.forward_layers``; a graph is replayed where this pass has one."""
        found = self.graphs.states(tokens, parents, cache, levels, hidden_layers)
        return super().forward_layers(tokens, parents, cache, levels, hidden_layers) if found is None else found


_MODELS: weakref.WeakSet[GraphedLM] = weakref.WeakSet()


def _repeated(work: Callable[[], States]) -> tuple[Callable[[], None], States]:
    """``work``, with its results copied to the addresses of the first ones."""
    hidden, seen = work()

    def run() -> None:
        again, hidden_layers = work()
        hidden.copy_(again)
        for tap, state in hidden_layers.items():
            seen[tap].copy_(state)

    return run, (hidden, seen)


def padded(nodes: int) -> int:
    """Nodes that are computed in the place of so many: the next of ``NODES``."""
    return nodes if nodes > NODES[-1] else NODES[bisect_left(NODES, nodes)]


def bucket(slots: int) -> int:
    """The smallest of 128, 192, 256, 384, 512, .. that holds so many: attention reads at most half as much again."""
    size = _LEAST_BUCKET
    while size < slots:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
