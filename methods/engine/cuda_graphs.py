"""Passes of fixed shape as CUDA graphs: one launch for all kernels of all layers.

A small model's kernels are shorter than the time to launch them, so a pass that is launched kernel by kernel measures
the host. A graph needs the same addresses and shapes each time: caches are handed out from a pool, nodes go into fixed
buffers, and keys are read up to a bucket above the longest row, those after each row's end masked. What was captured
over one cache is replayed for all texts that use it.

Triton's kernels (``methods.engine.triton_layers``) read where rows end on the device, so that one graph of a number of
nodes is enough for all lengths.

Passes over other numbers of nodes than those of ``NODES`` are filled up to the next one: nodes after the last are read
by none before them. The output matrix is multiplied outside, so the next pass does not overwrite logits and states.

A round of greedy decoding (``round``) is recorded whole: the pass, the output matrix, which nodes are kept, and their
packing in the cache (``methods.engine.greedy_round``). What it returns lasts until the next round.

A shape is captured at its second use; before, and where nothing fits, a pass runs kernel by kernel. ``prepare``
captures all that a run may need before its clock starts, and nothing is captured after it: what has no graph then is
replayed by that of a larger pass or a deeper tree. ``capture=False`` runs the same fixed form without a graph, for
comparison in tests.

A graph is of one batch size, so finished rows stay in the batch: without them each pass would need other graphs, which
would be captured while the decode is timed, or run kernel by kernel.
"""

from __future__ import annotations

import copy
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from methods.engine.causal_lm import CausalLM, States
from methods.engine.greedy_round import Round, end_round
from methods.engine.kv_cache import Cache
from methods.engine.sampling import argmax, top_candidates
from methods.engine.token_tree import ABSENT, Nodes, Parents, closure_steps

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
        whole: a round and not only its pass.
        candidates: of a round, how many of the most likely tokens after each node are wanted.
    """

    nodes: int
    closure: int | None
    end: int
    hidden_layers: tuple[int, ...]
    whole: bool = False
    candidates: int = 0

    @property
    def levels(self) -> int | None:
        """Of the deepest tree of this form; None: a chain."""
        return None if self.closure is None else 1 << self.closure

    @property
    def places(self) -> int:
        """For what a round keeps, one of ``NODES`` or M."""
        return self.nodes if self.levels is None else min(self.nodes, padded(1 + self.levels))

    def serves(self, other: Form, longest: int) -> bool:
        """Whether what has this form does for another too, over rows of up to so many tokens."""
        deep = other.closure is None or (self.closure is not None and self.closure >= other.closure)
        wide = self.nodes >= other.nodes and longest + self.nodes <= self.end
        same = (self.whole, self.candidates) == (other.whole, other.candidates)
        return deep and wide and same and {*self.hidden_layers} >= {*other.hidden_layers}


class Shape(NamedTuple):
    """What passes of different sizes and lengths have in common, see ``Form``."""

    closure: int | None
    hidden_layers: tuple[int, ...]
    whole: bool = False
    candidates: int = 0

    def form(self, nodes: int, end: int) -> Form:
        """Of a pass of this shape."""
        return Form(nodes, self.closure, end, self.hidden_layers, self.whole, self.candidates)


class Recorded(NamedTuple):
    """A function and its results, which ``run`` renews at the same addresses."""

    run: Callable[[], None]
    results: tuple[Tensor, ...]


class _Layout(NamedTuple):
    """Parts of the buffers of inputs: those that nodes are copied into, those after the nodes, and what fills these;
    the parents of a chain.
    """

    buffers: list[Tensor]
    unused: list[Tensor]
    fillings: list[Tensor]
    chain: Parents


@dataclass(slots=True)
class Replay:
    """A captured pass or round.

    Attributes:
        form: its own.
        tokens, parents: input buffers.
        recorded: the replay and what it yields.
        tables: other tensors it reads; a longer table takes the place of the model's, not of these.
        given: nodes in the buffers; those after them are without a token and have the root as parent.
    """

    form: Form
    tokens: Int[Tensor, "B M"]
    parents: Parents
    recorded: Recorded
    tables: tuple[Tensor, ...]
    given: int = -1
    _layouts: dict[tuple[int, ...], _Layout] = field(default_factory=dict)

    def run(self, columns: Sequence[Int[Tensor, "B _"]], parents: Parents, given: int) -> None:
        """Replay for nodes that are given in parts, side by side; all inputs are copied in one launch."""
        widths = tuple([part.shape[1] for part in columns])
        layout = self._layouts.get(widths)
        if layout is None:
            layout = self._layouts[widths] = self._layout(widths, given)
        above = layout.chain if parents is None else parents
        buffers, sources = layout.buffers, [*columns] if above is None else [*columns, above]
        if given != self.given:
            buffers, sources = [*buffers, *layout.unused], [*sources, *layout.fillings]
            self.given = given
        torch._foreach_copy_(buffers, sources)
        self.recorded.run()

    def _layout(self, widths: tuple[int, ...], given: int) -> _Layout:
        with torch.inference_mode(False):
            *buffers, after = self.tokens.split([*widths, self.form.nodes - given], dim=1)
            unused, fillings, chain = [after], [torch.full_like(after, ABSENT if self.form.whole else 0)], None
            if self.parents is not None:
                above, after = self.parents.split([given - 1, self.form.nodes - given], dim=1)
                buffers.append(above)
                unused.append(after)
                fillings.append(torch.full_like(after, -1))
                chain = torch.arange(-1, given - 2, device=above.device).expand_as(above)
        full = given == self.form.nodes
        return _Layout(buffers, [] if full else unused, [] if full else fillings, chain)

    @property
    def states(self) -> States:
        """Of a pass: states after all layers, and after those asked for."""
        hidden, *seen = self.recorded.results
        return hidden, dict(zip(self.form.hidden_layers, seen, strict=True))

    @property
    def round(self) -> Round:
        """Of a round."""
        bonus, path, report, hidden, *seen = self.recorded.results
        candidates = seen.pop() if self.form.candidates else None
        return Round(hidden, bonus, path, report, dict(zip(self.form.hidden_layers, seen, strict=True)), candidates)


class Aside(NamedTuple):
    """Memory and stream of graphs that are made and released together.

    An allocator's pool takes no further capture once all its graphs are gone (torch 2.11: INTERNAL ASSERT use_count >
    0), and later versions release cuBLAS' work space together with the last graph of a stream; so neither is shared
    between caches.
    """

    memory: Any
    stream: Any

    @classmethod
    def made(cls, capture: bool) -> Aside | None:
        """A new one; None where nothing is captured."""
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream()) if capture else None


@dataclass
class Pooled:
    """A cache whose tensors keep their addresses, and what was captured over it.

    Attributes:
        cache: owner of the tensors; decoders get handles that share them and have lengths of their own.
        handle: the one in use, if it is alive.
        seen: how often each form was used before it was captured.
        aside: where its graphs are captured, which are made and released together; None: nothing is captured.
    """

    cache: Cache
    handle: weakref.ref[Cache] | None = None
    seen: dict[Form, int] = field(default_factory=dict)
    replays: dict[Form, Replay] = field(default_factory=dict)
    aside: Aside | None = None

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


class _Latest(NamedTuple):
    """What was replayed the last time; it serves rows of at least ``shortest`` and at most ``longest`` tokens."""

    replay: Replay
    cache: Cache
    shortest: int
    longest: int

    def serves(self, cache: Cache, tokens: int) -> bool:
        own = self.cache
        return own.store is cache.store and own.length is cache.length and self.shortest <= tokens <= self.longest


class Graphs:
    """The graphs of one model, or of one view of it.

    Args:
        lm: whose passes are captured.
        capture: see ``GraphedLM.of``.

    Attributes:
        captured: number of graphs made.
        seconds: time that making them took.
        missed: passes without a graph since ``prepare``.
        prepared: nothing is captured any more.
        drafts: recorded along, beside the passes.
    """

    def __init__(self, lm: CausalLM, capture: bool = True) -> None:
        assert not capture or lm.device.type == "cuda", "only CUDA has graphs"
        self._lm, self.capture = weakref.ref(lm), capture
        self._pooled: list[Pooled] = []
        self._shapes: dict[Shape, int] = {}  # of passes and rounds: their most nodes
        self._latest: dict[tuple[Shape, int], _Latest] = {}  # by nodes that were given
        self.prepared = False
        self.drafts: weakref.WeakSet[RecordedDrafts] = weakref.WeakSet()
        self._expected = self._most = 1  # nodes of passes that may come, and of those in all decodes so far
        self.captured, self.seconds, self.missed = 0, 0.0, 0

    @property
    def has_rounds(self) -> bool:
        """Whether whole rounds were used, not only passes."""
        return any(shape.whole for shape in self._shapes)

    def new_cache(self, batch: int, capacity: int, make: Callable[[int, int], Cache]) -> Cache:
        """An empty cache: a free one of that size from the pool, else a new one by ``make``."""
        return self._cache(batch, capacity, make).hand_out()

    def _cache(self, batch: int, capacity: int, make: Callable[[int, int], Cache]) -> Pooled:
        for pooled in self._pooled:
            if pooled.fits(batch, capacity):
                return pooled
        kept = [pooled for pooled in self._pooled if pooled.in_use or pooled.cache.batch != batch]
        with torch.inference_mode(False):  # a cache made within it could not be used outside of it
            made = Pooled(make(batch, bucket(capacity)), aside=Aside.made(self.capture))
        self._pooled = [*kept[-_MOST_CACHES:], made]
        self._latest.clear()  # it may hold a cache that is none of these
        return made

    def prepare(self, longest: Mapping[int, int], make: Callable[[int, int], Cache]) -> None:
        """Capture every pass that rows up to a length may need, by the passes seen so far; nothing is captured later.

        Args:
            longest: by batch size, tokens of the longest row at its end.
            make: a cache of a batch size and a capacity.
        """
        self.prepared, most = False, max(self._most, *self._shapes.values(), 1)
        slots = {batch: length + 2 * padded(most) for batch, length in longest.items()}
        for batch, length in longest.items():
            pooled = self._cache(batch, slots[batch], make)
            with torch.inference_mode():
                pooled.cache.reset()
                for form in self._forms(pooled.cache.capacity, length):
                    if form not in pooled.replays and len(pooled.replays) < _MOST_GRAPHS:
                        self._make(pooled, form)
        for drafts in list(self.drafts):
            with torch.inference_mode():
                drafts.prepare(slots)
        self.prepared, self.missed = True, 0

    def expect(self, nodes: int) -> None:
        """Passes of the decode that begins have up to so many nodes."""
        self._expected, self._most = min(nodes, NODES[-1]), max(nodes, self._most)

    def _note(self, shape: Shape, given: int) -> None:
        """A pass over so many nodes; after one over a draft, one over the largest chain or tree may come."""
        self._shapes[shape] = max(given, self._shapes.get(shape, 0))
        if 1 < given < self._expected:
            deepest = None if shape.closure is None else closure_steps(self._expected - 1)
            self._note(shape._replace(closure=deepest), self._expected)

    def _forms(self, capacity: int, longest: int) -> Iterator[Form]:
        """Of the passes seen so far, smaller ones and those without a draft, over rows up to a length."""
        undrafted = {shape._replace(closure=None): 1 for shape in self._shapes}
        for shape, most in (undrafted | self._shapes).items():
            least = 1 if shape.closure is None else 2
            for nodes in sorted({padded(most), *(nodes for nodes in NODES if least <= nodes <= most)}):
                if self._reads_lengths(nodes):
                    yield shape.form(nodes, capacity)
                    continue
                end, last = _LEAST_BUCKET, min(bucket(longest + nodes), capacity)
                while end <= last:
                    yield shape.form(nodes, end)
                    end = bucket(end + 1)

    def states(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None, hidden_layers: Collection[int]
    ) -> States | None:
        """Hidden states after all layers and after ``hidden_layers``; None where this pass has no fixed form (yet)."""
        given = tokens.shape[1]
        shape = Shape(None if parents is None else closure_steps(levels or given), tuple(sorted(hidden_layers)))
        replay = self._replay(shape, given, cache)
        if replay is None:
            return None
        replay.run([tokens], parents, given)
        hidden, seen = replay.states
        return hidden[:, :given].clone(), {tap: state[:, :given].clone() for tap, state in seen.items()}

    def round(
        self,
        columns: Sequence[Int[Tensor, "B _"]],
        parents: Parents,
        cache: Cache,
        levels: int | None,
        hidden_layers: Collection[int],
        candidates: int = 0,
        unread: int = 0,
    ) -> Round | None:
        """A round of greedy decoding, see ``GraphedLM.round``; None where it has no fixed form (yet)."""
        given = sum(part.shape[1] for part in columns)
        closure = None if parents is None else closure_steps(levels or given)
        shape = Shape(closure, tuple(sorted(hidden_layers)), True, candidates)
        replay = self._replay(shape, given, cache, unread)
        if replay is None:
            return None
        replay.run(columns, parents, given)
        return replay.round

    def _replay(self, shape: Shape, given: int, cache: Cache, unread: int = 0) -> Replay | None:
        """Of a pass over so many nodes; at its second use it is captured."""
        longest, latest = max(cache.lengths) + unread, self._latest.get((shape, given))
        if latest is not None and latest.serves(cache, longest):
            return latest.replay
        pooled = next((known for known in self._pooled if known.cache.store is cache.store), None)
        nodes = padded(given)
        least = longest + nodes
        end = max(cache.capacity, least) if self._reads_lengths(nodes) else bucket(least)
        if pooled is None or end > cache.capacity or cache.length is not pooled.cache.length:
            self.missed += 1
            return None
        form = shape.form(nodes, end)
        self._note(shape, given)
        replay = pooled.replays.get(form)
        if replay is None and self._comes_again(pooled, form):
            replay = self._make(pooled, form)
        if replay is None and self.prepared:
            replay = self._larger(pooled, form, longest)
        if replay is None:
            self.missed += 1
        else:
            self._latest[shape, given] = _Latest(replay, pooled.cache, longest, replay.form.end - replay.form.nodes)
        return replay

    @staticmethod
    def _larger(pooled: Pooled, form: Form, longest: int) -> Replay | None:
        """The smallest that does for a form too."""
        found = [other for other in pooled.replays if other.serves(form, longest)]
        best = min(found, key=lambda other: (other.nodes, other.closure or 0, other.end), default=None)
        return None if best is None else pooled.replays[best]

    def _reads_lengths(self, nodes: int) -> bool:
        lm = self._lm()
        return lm is not None and lm.reads_lengths(nodes)

    def _comes_again(self, pooled: Pooled, form: Form) -> bool:
        """Whether a form is used for the second time and may be captured."""
        pooled.seen[form] = pooled.seen.get(form, 0) + 1
        return not (self.prepared or pooled.seen[form] < _COMES_AGAIN or len(pooled.replays) >= _MOST_GRAPHS)

    def _make(self, pooled: Pooled, form: Form) -> Replay:
        began = time.perf_counter()
        lm = self._lm()
        assert lm is not None, "a model owns its graphs"
        tables = lm.reserve_positions(pooled.cache.capacity)
        with torch.inference_mode(False):
            tokens = torch.zeros(pooled.cache.batch, form.nodes, dtype=torch.long, device=lm.device)
            parents = None if form.closure is None else torch.full_like(tokens[:, 1:], -1)
        kernels = lm.round_kernels(form.nodes)

        def work() -> tuple[Tensor, ...]:
            read = tokens.clamp(min=0) if form.whole and kernels is None else tokens
            state = lm.begin(read, parents, pooled.cache, form.levels, end=form.end)
            seen = lm.run(state, range(lm.n_layers), form.hidden_layers)
            taps = [seen[tap] for tap in form.hidden_layers]
            if not form.whole:
                return state.hidden, *taps
            states = [lm.norm(state.hidden), *taps]
            logits = lm.head(states[0])
            candidates = [top_candidates(logits, k, lm.kernels == "triton")] if (k := form.candidates) else []
            if kernels is None:
                end, wanted = end_round, argmax(logits)
            else:
                end, wanted = kernels.end_round, candidates[0][..., 0] if candidates else kernels.argmax(logits)
            levels = form.levels or form.nodes - 1
            *found, kept = end(tokens, parents, state.reach, levels, form.places, wanted, states, pooled.cache)
            return *found, *kept, *candidates

        recorded = record(work, pooled.aside, [pooled.cache.length])
        pooled.replays[form] = Replay(form, tokens, parents, recorded, tables)
        self.captured += 1
        self.seconds += time.perf_counter() - began
        return pooled.replays[form]


@dataclass(slots=True)
class _Call:
    """A recorded call: buffers of its inputs, and what else the function returned beside tensors."""

    inputs: list[Tensor]
    recorded: Recorded
    draft: Any


Work = Callable[..., tuple[tuple[Tensor, ...], Any]]


class Calls:
    """Recorded calls of functions on the device, such as a draft, beside the graphs of a model.

    Args:
        graphs: of the model, which count the calls too.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._calls: dict[Hashable, _Call] = {}
        self._aside = Aside.made(graphs.capture)

    def inputs(self, batch: int) -> list[list[Tensor]]:
        """Zeros in the shapes of all calls so far, for another batch size."""
        return [[like.new_zeros(batch, *like.shape[1:]) for like in call.inputs] for call in self._calls.values()]

    @torch.inference_mode()
    def __call__(self, work: Work, inputs: Sequence[Tensor], moved: Sequence[Tensor] = ()) -> Any:
        """What ``work`` makes of the inputs, at addresses that stay; it lasts until the next call.

        Args:
            work: returns the tensors to renew in every call, and an object that contains them, which is returned here.
                It must depend on nothing else that changes but what is at fixed addresses.
            inputs: the batch first.
            moved: tensors at fixed addresses that it changes.
        """
        call = self.record(work, inputs, moved)
        if call is None:
            self._graphs.missed += 1
            return work(*inputs)[1]
        torch._foreach_copy_(call.inputs, list(inputs))
        call.recorded.run()
        return call.draft

    def record(self, work: Work, inputs: Sequence[Tensor], moved: Sequence[Tensor] = ()) -> _Call | None:
        """The call with inputs of these shapes; None: there is none, and nothing is captured any more."""
        key = tuple(tensor.shape for tensor in inputs)
        if key in self._calls or self._graphs.prepared:
            return self._calls.get(key)
        began = time.perf_counter()
        with torch.inference_mode(False):
            buffers = [torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs]
        for buffer, given in zip(buffers, inputs, strict=True):
            buffer.copy_(given)
        drafts: list[Any] = []

        def tensors() -> tuple[Tensor, ...]:
            found, draft = work(*buffers)
            drafts.append(draft)
            return found

        recorded = record(tensors, self._aside, moved)
        self._calls[key] = _Call(buffers, recorded, drafts[-1] if self._aside else drafts[0])
        self._graphs.captured += 1
        self._graphs.seconds += time.perf_counter() - began
        return self._calls[key]


@runtime_checkable
class RecordedDrafts(Protocol):
    """Drafts that are recorded beside the graphs of a model."""

    def prepare(self, slots: Mapping[int, int]) -> None:
        """Record what rows may need by what was seen so far; ``slots``: of the longest row, by batch size."""
        ...


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

    def without_graphs(self) -> CausalLM:
        """The same weights, every pass kernel by kernel."""
        view = object.__new__(CausalLM)
        view.__dict__.update({name: value for name, value in self.__dict__.items() if name != "graphs"})
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

    @property
    def records_rounds(self) -> bool:
        """Whether rounds are recorded, or may still be: those that are sampled are not."""
        return not self.graphs.prepared or self.graphs.has_rounds

    def round(
        self,
        columns: Sequence[Int[Tensor, "B _"]],
        parents: Parents,
        cache: Cache,
        *,
        levels: int | None = None,
        hidden_layers: Collection[int] = (),
        candidates: int = 0,
        unread: int = 0,
    ) -> Round | None:
        """A round of greedy decoding in one replay: the pass, which nodes are kept, their packing and the new lengths.

        The lengths grow on the device only: ``Cache.advanced`` must follow. Results last until the next round. To be
        called in inference mode.

        Args:
            columns: ids of the nodes in parts, side by side, the root first; -1: there is no node.
            parents: of the other nodes; None: a chain.
            levels, hidden_layers: see ``forward``.
            candidates: how many of the most likely tokens after each node are wanted, see ``Output``.
            unread: tokens by which rows may have grown on the device since the host read their lengths.

        Returns:
            None where this round has no graph (yet).
        """
        return self.graphs.round(columns, parents, cache, levels, hidden_layers, candidates, unread)

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


def record(work: Callable[[], tuple[Tensor, ...]], aside: Aside | None, moved: Sequence[Tensor] = ()) -> Recorded:
    """Capture a function without arguments; what it writes into a cache meanwhile is after the end of all rows.

    Args:
        aside: where; None: without a graph, the function runs again and its results go to the addresses of the first.
        moved: tensors that it changes, which are afterwards as before.
    """
    before = [tensor.clone() for tensor in moved]

    def restore() -> None:
        for tensor, value in zip(moved, before, strict=True):
            tensor.copy_(value)

    if aside is not None:
        return _captured(work, aside, restore)
    results = work()
    restore()

    def run() -> None:
        for kept, again in zip(results, work(), strict=True):
            kept.copy_(again)

    return Recorded(run, results)


def _captured(work: Callable[[], tuple[Tensor, ...]], aside: Aside, restore: Callable[[], None]) -> Recorded:
    """Warm-up and capture share a stream, so that cuBLAS takes its work space before, outside of the graphs' pool."""
    aside.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside.stream):
        for _ in range(_WARM_UPS):
            work()
            restore()
    torch.cuda.current_stream().wait_stream(aside.stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=aside.memory, stream=aside.stream):
        results = work()
    return Recorded(graph.replay, results)


def padded(nodes: int) -> int:
    """Nodes that are computed in the place of so many: the next of ``NODES``."""
    return nodes if nodes > NODES[-1] else NODES[bisect_left(NODES, nodes)]


def bucket(slots: int) -> int:
    """The smallest of 128, 192, 256, 384, 512, .. that holds so many: attention reads at most half as much again."""
    size = _LEAST_BUCKET
    while size < slots:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
