"""Sequence machine: random sequences of calls of the Python API on a host, against the NumPy reference in float64.

A sequence makes operands of several libraries and layouts, and calls forward and backward with them: on several
streams, with results in the caller's arrays, with contents that change between calls, from two threads, by a Bound, in
a captured graph, with operands that die right after the call, and with refused calls in between. A paged cache grows by
append_to_cache, is attended to in whole or in two parts, and the parts are merged.

Results are compared when their stream is waited for: with float64 by the rule of testing/guarded_check.py, and with
every earlier result of the same problem bit for bit. No other byte of any storage may change. At the end of a sequence
nothing may be left: arrays, events, operands that are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.api.serving import append_to_cache, merge_states
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.reference import paged, serving
from cutlass_py_attn.runtime import driver, lifetimes
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.runtime.binding import Bound, bind_problem
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tools.lab.race.sequence_hosts import DEVICE, FOREIGN, LAYOUTS, LIBRARIES, NUMPY, Array, Held, Host

LINES: Final = (
    "bf16_d64_q72_s136_b2_h4_causal",
    "f16_d64_q40_s72_b2_h4k2_causal_br_softcap4",
    "f32_d32_q33_s65_b1_h2_full",
    "bf16_d128_q64_s64_b1_h4k1_window_left20_right4",
    "f16_d32_q48_s48_b2_h2_causal_alibi_sinks",
    "bf16_d64_q48_s80_b1_h4_full_bias_dropout0.25",
    "f16_d64_q33_s40_b2_h2_causal_dropout0.5_deviceseed",
    "f16_d64_n30x40,17x50u45,5x5_h4k2_causal",
)
CASES: Final = (
    *(f"{direction} {line}" for line in LINES for direction in ("forward", "backward")),
    "backward bf16_d64_q130_s130_b1_h2_causal_deterministic",
    "backward f16_d64_q33_s48_b1_h4k2_full_gradlse",
    "forward f16_d64_q2_s300_b2_h8k2_causal_br",
)
SEEDS: Final = (0, 1)
PHILOX_SEED: Final = 5
ROWS: Final = ("query", "key", "value", "grad_output", "output")  # have layouts; other operands are dense
PAGE, PAGES, MOST_TOKENS = 16, 24, 24  # of the cache; rows of one append
CACHE: Final = "bf16_d64_n{queries}x{capacity}u{first},{queries}x{capacity}u{second}_paged16_h4k2_{mask}"
HEADS, KEY_HEADS, COLUMNS = 4, 2, 64
REFUSED: Final = (
    "other head_dim", "other dtype", "misspelt option", "mixed memory", "out is query", "out overlaps query",
    "no stream", "unknown backend", "read-only out", "softcap of text", "scale of NaN", "wrong logsumexp",
)  # fmt: skip


@functools.cache
def expectation(line: str) -> guarded_check.Expected:
    """Returns the inputs and the expected results of a case; arrays of an option that is a number are not there."""
    return guarded_check.expect(Case.parse(line))


@functools.cache
def read_by(line: str) -> frozenset[str]:
    """Returns the arrays that a call of a case reads."""
    case = Case.parse(line)
    problem = case.problem()
    names = {*problem.tensors(), *problem.vectors()}
    return frozenset(names - {"output"} if case.direction == "forward" else names | {"logsumexp"})


@dataclass
class Tally:
    """What the sequences of a process have done. bits: digest of each problem's results; worst: error / allowed."""

    sequences: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    results: int = 0
    worst: float = 0.0
    bits: dict[tuple[str, str, str, str], str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Call:
    """A case with its operands in arrays of one place and layout. users: streams with launches that may be running."""

    case: Case
    place: str
    layout: str
    held: dict[str, Held]
    users: set[int] = field(default_factory=set)
    is_unprotected: bool = False  # whether a launch may be running that does not protect operands that die

    def key(self, out: str) -> tuple[str, str, str]:
        """Returns what decides the bits of its results, in the caller's arrays of layout `out`.

        NumPy arrays are copied to dense ones on the GPU.
        """
        return self.case.line, *(("dense", "dense") if self.place == NUMPY else (self.layout, out))


@dataclass(eq=False)
class Pending:
    """Results of a launch on a stream, and how to compare them. targets: the caller's arrays among them."""

    label: str
    stream: int
    results: Mapping[str, Any]
    targets: Mapping[str, Held]
    check: Callable[[dict[str, Array]], Mapping[str, float]]
    key: tuple[str, str, str] | None = None  # under which all results have the same bits


@dataclass(eq=False)
class Captured:
    """A graph of a call. philox_seed: number that its launches have, of a call with a number."""

    graph: Any
    call: Call
    philox_seed: int
    results: Mapping[str, Any]
    stream: Any


@dataclass(eq=False)
class Cache:
    """A paged cache of two sequences, on one stream. pools: what the model says it holds; lengths: keys so far."""

    place: str
    stream: Any
    pools: dict[str, Held]
    table: Array
    lengths: list[int]
    drawn: int = 0  # seeds used so far


def handle_of(stream: Any) -> int:
    """Returns the handle of a stream of the host; 0 for None."""
    return 0 if stream is None else int(stream.cuda_stream)


class SequenceMachine(RuleBasedStateMachine):
    """The rules. Subclasses have the host and the tally."""

    host: ClassVar[Host]
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.is_started = False
        self.has_failed = False
        self.calls: list[Call] = []
        self.graphs: list[Captured] = []
        self.pending: list[Pending] = []
        self.cache: Cache | None = None
        self.workspaces: dict[int, Held] = {}

    @initialize(seed=st.integers(0, 2**16), line=st.sampled_from(CASES), place=st.integers(0, 4))
    def start(self, seed: int, line: str, place: int) -> None:
        """Starts the host's sequence, with the operands of one case."""
        self.host.begin(seed)
        self.is_started = True
        self.make(line, 0, place, 0)

    # Operands

    @rule(line=st.sampled_from(CASES), seed=st.sampled_from(SEEDS), place=st.integers(0, 4), layout=st.integers(0, 4))
    def make(self, line: str, seed: int, place: int, layout: int) -> None:
        """Makes the operands of a case."""
        self.count("operands")
        self.calls.append(self.made(line, seed, place, layout))

    @rule(
        line=st.sampled_from(CASES),
        place=st.integers(1, 2),
        layouts=st.permutations(range(4)),
        stream=st.integers(0, 2),
    )
    def in_layouts(self, line: str, place: int, layouts: list[int], stream: int) -> None:
        """Makes the operands of a case in two layouts, and makes both calls."""
        self.count("two layouts")
        for layout in layouts[:2]:
            self.calls.append(self.made(line, 0, place, layout))
            self.launch(self.calls[-1], self.stream(stream), 0, 0)

    @rule(number=st.integers(0, 99), seed=st.sampled_from(SEEDS))
    @precondition(lambda self: self.calls)
    def change(self, number: int, seed: int) -> None:
        """Gives the operands of a call other contents, in stream order where that is safe."""
        if call := self.chosen(number):
            self.count("changed contents")
            self.changed(call, seed, PHILOX_SEED + seed)

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: self.calls)
    def forget(self, number: int) -> None:
        """Drops the operands of a call, whose kernels may be running."""
        call = self.chosen(number)
        if call is None or any(graph.call is call for graph in self.graphs):
            return
        self.count("dropped operands")
        # Nor does anybody protect an array that this machine copied to on another stream than the array's own.
        if call.is_unprotected or any(held.stream for held in call.held.values()):
            self.settle()
        self.calls.remove(call)

    # Calls

    @rule(number=st.integers(0, 99), stream=st.integers(0, 2), way=st.integers(0, 2), out=st.integers(-3, 3))
    @precondition(lambda self: self.calls)
    def call(self, number: int, stream: int, way: int, out: int) -> None:
        """Calls forward or backward. way: the stream is current, or passed as an object or a handle."""
        if call := self.chosen(number):
            self.count("backward" if call.case.direction == "backward" else "forward")
            self.launch(call, self.stream(stream), way, out)

    @rule(number=st.integers(0, 99), way=st.integers(0, 2))
    @precondition(lambda self: self.calls)
    def on_every_stream(self, number: int, way: int) -> None:
        """Makes a call on each stream, without a wait."""
        call = self.chosen(number)
        assert call is not None
        self.count("every stream")
        for stream in (1, 2, 0):
            self.launch(call, self.stream(stream), way, 0)

    @rule(line=st.sampled_from(CASES), place=st.integers(0, 4), stream=st.integers(1, 2), way=st.integers(1, 2))
    def dying(self, line: str, place: int, stream: int, way: int) -> None:
        """Calls with operands that die right afterwards, on a stream that is not the current one."""
        self.count("dying operands")
        call = self.made(line, 0, place, 0)
        self.host.delay(handle_of(self.stream(stream)))
        self.launch(call, self.stream(stream), way, 0)
        sizes = [held.image.nbytes for held in call.held.values()]
        del call
        self.host.reuse(sizes)

    @rule(numbers=st.tuples(st.integers(0, 99), st.integers(0, 99)), streams=st.tuples(*[st.integers(0, 2)] * 2))
    @precondition(lambda self: self.calls)
    def threads(self, numbers: tuple[int, int], streams: tuple[int, int]) -> None:
        """Makes two calls in two threads."""
        chosen = [self.chosen(number) for number in numbers]
        if None in chosen:
            return
        self.count("two threads")
        pairs = list(zip([each for each in chosen if each is not None], map(self.stream, streams), strict=True))
        for call, stream in pairs:
            self.order(call, stream, current=0)
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(self.in_thread, call, stream) for call, stream in pairs]
            for (call, stream), job in zip(pairs, jobs, strict=True):
                self.expect(call, handle_of(stream), job.result(), {}, "thread")

    @rule(number=st.integers(0, 99), stream=st.integers(0, 2), own=st.booleans())
    @precondition(lambda self: self.calls)
    def bound(self, number: int, stream: int, own: bool) -> None:
        """Launches the Bound of a call with dense operands. own: with a workspace of the caller."""
        call = self.chosen(number)
        if call is None or call.layout != "dense" or call.place in (NUMPY, DEVICE):
            return
        self.count("Bound")
        self.launch_bound(call, self.stream(stream), own)

    @rule(number=st.integers(0, 99), stream=st.integers(1, 2), seed=st.sampled_from(SEEDS))
    @precondition(lambda self: self.calls)
    def capture(self, number: int, stream: int, seed: int) -> None:
        """Captures a call, which was made once before, and launches the graph."""
        call = self.chosen(number)
        if call is None or call.place not in self.host.captured or len(self.graphs) >= 3:
            return
        self.count("captures")
        chosen = self.stream(stream)
        self.launch(call, chosen, 0, 0)
        self.settle()
        graph, results = self.host.capture(chosen, lambda: self.attend(call, {}, None))
        self.graphs.append(Captured(graph, call, call.case.philox_seed, results, chosen))
        self.replay(len(self.graphs) - 1, seed)

    @rule(number=st.integers(0, 99), seed=st.sampled_from(SEEDS))
    @precondition(lambda self: self.graphs)
    def replay(self, number: int, seed: int) -> None:
        """Launches a graph with other contents of its operands."""
        if not self.graphs:
            return
        self.count("replays")
        graph = self.graphs[number % len(self.graphs)]
        self.settle()  # each launch writes the same results
        self.changed(graph.call, seed, graph.philox_seed)
        self.order(graph.call, graph.stream, current=-1)
        self.host.launch(graph.graph, graph.stream)
        self.expect(graph.call, handle_of(graph.stream), graph.results, {}, "graph")

    @rule(number=st.integers(0, 99), kind=st.sampled_from(REFUSED))
    @precondition(lambda self: self.calls)
    def refused(self, number: int, kind: str) -> None:
        """Makes a call that must be refused before anything is launched."""
        if call := self.chosen(number):
            self.count("refused calls")
            self.refuse(call, kind)

    # Serving

    @rule(place=st.integers(0, 4), stream=st.integers(0, 2), seed=st.sampled_from(SEEDS))
    @precondition(lambda self: self.cache is None)
    def start_cache(self, place: int, stream: int, seed: int) -> None:
        """Makes a cache with a few keys."""
        self.count("caches")
        name = self.place(place)
        with self.on(self.stream(stream) if name in LIBRARIES else None) as current:
            empty = np.full((PAGES, PAGE, KEY_HEADS, COLUMNS), np.nan, numpy_dtype("bfloat16"))
            pools = {pool: self.host.hold(name, empty, "dense", current) for pool in ("key", "value")}
        table = np.random.default_rng(seed).permutation(PAGES).astype(np.int32).reshape(2, PAGES // 2)
        self.cache = Cache(name, self.stream(stream), pools, table, [0, 0])
        self.stored(self.cache, (PAGE + 2, PAGE * seed + 5))

    @rule(tokens=st.tuples(st.integers(0, MOST_TOKENS), st.integers(0, MOST_TOKENS)))
    @precondition(lambda self: self.cache is not None)
    def append(self, tokens: tuple[int, int]) -> None:
        """Stores rows of both sequences."""
        assert self.cache is not None
        self.count("appends")
        self.stored(self.cache, tokens)

    @rule(queries=st.integers(1, 2), bottom_right=st.booleans(), in_parts=st.booleans())
    @precondition(lambda self: self.cache is not None and min(self.cache.lengths) > 1)
    def decode(self, queries: int, bottom_right: bool, in_parts: bool) -> None:
        """Attends to the cache, in whole or in two parts that are merged."""
        assert self.cache is not None
        in_parts = in_parts and min(self.cache.lengths) > PAGE
        self.count("merged decodes" if in_parts else "decodes")
        self.decoded(self.cache, queries, bottom_right and not in_parts, in_parts)

    # Waits

    @rule(stream=st.integers(0, 2))
    def wait(self, stream: int) -> None:
        """Waits for a stream and compares its results."""
        self.count("waits")
        handle = handle_of(self.stream(stream))
        self.host.synchronise(handle)
        self.compare([each for each in self.pending if each.stream == handle])

    @rule()
    def settle(self) -> None:
        """Waits for everything, and compares all results and storages."""
        self.host.synchronise()
        self.compare(list(self.pending))
        for call in self.calls:
            call.users.clear()
            call.is_unprotected = False
            for name, held in call.held.items():
                self.expect_image(held, f"{name} of {call.case.line}")
        for name, held in self.cache.pools.items() if self.cache else ():
            self.expect_image(held, f"{name} cache")

    def teardown(self) -> None:
        """Compares everything, drops it, and looks for what is left."""
        if not self.is_started:
            return
        try:
            if not self.has_failed:
                self.settle()
        finally:
            self.calls.clear()
            self.graphs.clear()
            self.pending.clear()
            self.workspaces.clear()
            self.cache = None
            wrong = self.host.end()
        if not self.has_failed:  # a failure keeps its arrays alive
            self.expect_none(wrong)
        self.tally.sequences += 1

    # What the rules do.

    def count(self, name: str) -> None:
        """Counts a step."""
        self.tally.steps[name] += 1

    def stream(self, number: int) -> Any:
        """Returns a stream; None for the legacy default stream."""
        return None if number == 0 else self.host.streams[number - 1]

    def place(self, number: int) -> str:
        """Returns a place of the host."""
        return self.host.places[number % len(self.host.places)]

    def chosen(self, number: int) -> Call | None:
        """Returns one of the calls; None if there is none."""
        return self.calls[number % len(self.calls)] if self.calls else None

    @contextmanager
    def on(self, stream: Any) -> Iterator[int]:
        """Context manager in which a stream is current; yields its handle."""
        with self.host.current(stream):
            yield handle_of(stream)

    def made(self, line: str, seed: int, place: int, layout: int) -> Call:
        """Returns a case with its operands, written on the default stream."""
        name = self.place(place)
        chosen = LAYOUTS[layout] if name != DEVICE else "dense"
        if chosen == "reversed" and name not in (NUMPY, FOREIGN):
            chosen = "dense"
        case = Case.parse(f"{line} seed={seed} philox_seed={PHILOX_SEED + seed}")
        given = expectation(case.line).arrays
        if name == DEVICE and any(array.dtype.kind in "iu" for array in given.values()):
            name = FOREIGN
        held = {
            each: self.host.hold(name, np.ascontiguousarray(array), chosen if each in ROWS else "dense")
            for each, array in given.items()
            if each in read_by(line)
        }
        return Call(case, name, chosen, held)

    def changed(self, call: Call, seed: int, philox_seed: int) -> None:
        """Writes other contents to the operands. philox_seed: of later calls, if it is a number."""
        if call.place == NUMPY or len(call.users) > 1:
            self.settle()
        stream = next(iter(call.users), 0)
        is_number = bool(call.case.philox)
        call.case = call.case.replace(seed=seed, philox_seed=philox_seed if is_number else PHILOX_SEED + seed)
        given = expectation(call.case.line).arrays
        for name, held in call.held.items():
            held.view[...] = given[name]
            if held.stream != stream and call.place != NUMPY:
                self.host.wait(stream, held.stream)
            self.host.write(held, stream)

    def order(self, call: Call, stream: Any, current: int) -> None:
        """Makes a launch wait for its operands as the caller must: arrays that another stream than the current one
        wrote. current: handle of the libraries' stream, for which a call waits itself; -1 for none."""
        handle = handle_of(stream)
        producers = {held.stream for held in call.held.values()} - {handle}
        if call.place in (*LIBRARIES, NUMPY):
            producers -= {current}
        elif current >= 0:
            producers.clear()  # an array of an unknown library names its stream
        for producer in producers:
            self.host.wait(handle, producer)
        call.users.add(handle)

    def launch(self, call: Call, stream: Any, way: int, out: int) -> None:
        """Calls forward or backward. out: layout of the caller's arrays for results; 0 or less for none."""
        # A call without stream= runs on the current stream of the operands' library; others know none.
        is_current = way == 0 and call.place in LIBRARIES
        given = stream if way == 1 else handle_of(stream)
        with self.on(stream if is_current else None) as current:
            self.order(call, stream, current)
            call.is_unprotected |= current != 0  # libraries take the current stream for that of the operands
            targets = self.targets(call, LAYOUTS[out], current) if out > 0 else {}
            results = self.attend(call, targets, None if is_current else given)
            self.expect(call, handle_of(stream), results, targets, "call", LAYOUTS[max(out, 0)])

    def in_thread(self, call: Call, stream: Any) -> Mapping[str, Any]:
        """Calls in another thread, which has no context."""
        with driver.device(0).current():
            return self.attend(call, {}, handle_of(stream))

    def targets(self, call: Call, layout: str, stream: int) -> dict[str, Held]:
        """Returns the caller's arrays for the results."""
        truth = expectation(call.case.line).truth
        place = FOREIGN if call.place == DEVICE else call.place
        kind = call.held["query"].image.dtype
        names = ("output",) if call.case.direction == "forward" else ("grad_query", "grad_key", "grad_value")
        return {name: self.host.hold(place, np.full(truth[name].shape, np.nan, kind), layout, stream) for name in names}

    def options(self, call: Call, held: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of a call beside stream and out."""
        spec = call.case.spec
        options: dict[str, Any] = {"mask": spec.mask, "scale": spec.scale, "softcap": spec.softcap}
        options |= {name: held[name] for name in ("bias", "alibi_slopes", "sinks", "grad_logsumexp") if name in held}
        if spec.dropout_p:
            numbers = call.case.philox or {name: held[name] for name in ("philox_seed", "philox_offset")}
            options["dropout"] = Dropout(spec.dropout_p, **numbers)
        if spec.sequences:
            longest = spec.shape.num_queries, spec.shape.num_keys
            starts = held["cu_seqlens_q"], held["cu_seqlens_k"]
            options["sequences"] = VariableLength(*starts, *longest, held.get("seqused_k"))
        return options

    def attend(self, call: Call, targets: Mapping[str, Held], stream: Any, **changes: Any) -> dict[str, Any]:
        """Makes a call and returns its results by name. changes: options, and operands in place of the call's."""
        held = {name: each.array for name, each in call.held.items()}
        held |= {name: changes.pop(name) for name in list(changes) if name in held}
        options = {**self.options(call, held), "kernels": self.host.kernels, "stream": stream, **changes}
        operands = held["query"], held["key"], held["value"]
        if call.case.direction == "forward":
            if targets:
                options["out"] = targets["output"].array
            output, logsumexp = attention_forward(*operands, **options)
            return {"output": output, "logsumexp": logsumexp}
        spec = call.case.spec
        names = tuple(name.removeprefix("grad_") for name in guarded_check.results_of(call.case))
        if targets:
            options["out"] = Gradients(**{name.removeprefix("grad_"): each.array for name, each in targets.items()})
        options = {"gradients": names, "deterministic": spec.deterministic, **options}
        rest = held["output"], held["logsumexp"]
        gradients = attention_backward(held["grad_output"], *operands, *rest, **options)
        return {f"grad_{name}": getattr(gradients, name) for name in names}

    def expect(
        self,
        call: Call,
        stream: int,
        results: Mapping[str, Any],
        targets: Mapping[str, Held],
        kind: str,
        out: str = "dense",
    ) -> None:
        """Adds the results of a call to those that are compared later."""
        for name, target in targets.items():
            if results[name] is not target.array:
                self.fail(f"{call.case.line}: {name} is not the array of out")
        case = call.case
        check = functools.partial(ratios, case, expectation(case.line), kind != "Bound")
        is_repeatable = case.direction == "forward" or case.spec.deterministic
        label = f"{kind}, {call.place}, {call.layout}, stream {stream:#x}: {case.line}"
        key = call.key(out) if is_repeatable and kind != "Bound" else None
        self.pending.append(Pending(label, stream, results, targets, check, key))

    def launch_bound(self, call: Call, stream: Any, own: bool) -> None:
        """Launches the Bound of a call; its operands and workspace are the caller's to protect."""
        handle = handle_of(stream)
        bound = bound_of(call.case.replace(seed=0, philox_seed=0).line, self.host.kernels)
        workspace = self.workspace(bound.workspace_bytes, handle) if own and bound.workspace_bytes else None
        self.order(call, stream, current=-1)
        call.is_unprotected = True  # a Bound keeps nothing alive
        truth = expectation(call.case.line).truth
        kinds = {name: np.float32 if name in FLOAT32 else call.held["query"].image.dtype for name in truth}
        targets = {
            name: self.host.hold(FOREIGN, np.full(array.shape, np.nan, kinds[name]), "dense", handle)
            for name, array in truth.items()
        }
        pointers = {
            name: self.host.address(held.storage) + held.view.ctypes.data - held.image.ctypes.data
            for name, held in (call.held | targets).items()
        }
        bound(pointers | call.case.philox, handle, workspace=workspace)
        results = {name: held.array for name, held in targets.items()}
        self.expect(call, handle, results, targets, "Bound")

    def workspace(self, size: int, stream: int) -> int:
        """Returns the address of a stream's workspace, which every Bound on that stream uses."""
        if stream not in self.workspaces or self.workspaces[stream].image.nbytes < size:
            self.settle()
            ones = np.full(size // 4 + 1, -1, np.int32)
            self.workspaces[stream] = self.host.hold(FOREIGN, ones, "dense", stream)
        return self.host.address(self.workspaces[stream].storage)

    def refuse(self, call: Call, kind: str) -> None:
        """Makes a call of this kind, which must raise and leave everything as it was."""
        changes, targets, stream = self.bad(call, kind)
        before = self.host.launches, len(lifetimes.kept), int(driver.call("cuCtxGetCurrent"))
        try:
            if kind == "wrong logsumexp":
                array, wrong = call.held["query"].array, call.held["key"].array
                merge_states(array, wrong, array, wrong, kernels=self.host.kernels)
            else:
                self.attend(call, targets, stream, **changes)
        except NotSupported:
            pass
        else:
            self.fail(f"{kind} was not refused: {call.case.line}, {call.place}")
        # Later calls drop operands of calls that are complete: fewer may be kept than before, not more.
        launches, kept, current = self.host.launches, len(lifetimes.kept), int(driver.call("cuCtxGetCurrent"))
        if launches != before[0]:
            self.fail(f"{kind}: a refused call launched a kernel")
        if kept > before[1]:
            self.fail(f"{kind}: a refused call keeps operands")
        if current != before[2]:
            self.fail(f"{kind}: a refused call changed the context")

    def bad(self, call: Call, kind: str) -> tuple[dict[str, Any], dict[str, Held], Any]:
        """Returns what makes a call wrong: changed options or operands, targets and the stream."""
        query, key, value = (call.held[name] for name in ("query", "key", "value"))
        place = FOREIGN if call.place == DEVICE else call.place
        stream = query.stream if place == FOREIGN else 0
        name = "output" if call.case.direction == "forward" else "grad_query"
        kinds = np.float32, np.float16
        other = kinds[query.image.dtype == np.float32]
        if kind == "other head_dim":
            return {"key": self.host.hold(place, key.view[..., :-8].copy(), "dense", stream).array}, {}, None
        if kind == "other dtype":
            return {"value": self.host.hold(place, value.view.astype(other), "dense", stream).array}, {}, None
        if kind == "mixed memory":
            mixed = value.view.copy() if call.place != NUMPY else self.host.hold(FOREIGN, value.view, "dense").array
            return {"value": mixed}, {}, None
        if kind == "out is query":
            return {}, {name: query}, None
        if kind == "out overlaps query":
            shape = expectation(call.case.line).truth[name].shape
            size = math.prod(shape)
            shared = self.host.hold(place, np.zeros(2 * size, query.image.dtype), "dense", stream)
            parts = [self.host.part(shared, shape, start) for start in (0, size - 8)]
            return {"query": parts[0]}, {name: dataclasses.replace(shared, array=parts[1])}, None
        if kind == "read-only out":
            target = self.host.hold(NUMPY, query.view, "dense")
            target.array.flags.writeable = False
            return {}, {name: target}, None
        wrong: dict[str, dict[str, Any]] = {
            "misspelt option": {"is_casual": True},
            "unknown backend": {"backend": "cuda"},
            "softcap of text": {"softcap": "4"},
            "scale of NaN": {"scale": math.nan},
        }
        return wrong.get(kind, {}), {}, object() if kind == "no stream" else None

    def stored(self, cache: Cache, tokens: tuple[int, int]) -> None:
        """Stores new rows in the cache and in the model."""
        most = [cache.table.shape[1] * PAGE - length for length in cache.lengths]
        counts = [min(count, room) for count, room in zip(tokens, most, strict=True)]
        slots = []
        for number, count in enumerate(counts):
            places = np.arange(cache.lengths[number], cache.lengths[number] + count)
            slots.append(cache.table[number, places // PAGE].astype(np.int64) * PAGE + places % PAGE)
            cache.lengths[number] += count
        order = np.concatenate([*slots, np.array([-1])]).astype(np.int64)  # a token that is skipped
        cache.drawn += 1
        draw = np.random.default_rng(cache.drawn)
        rows = [
            draw.standard_normal((order.size, KEY_HEADS, COLUMNS), dtype=np.float32).astype(numpy_dtype("bfloat16"))
            for _ in range(2)
        ]
        with self.on_cache(cache) as current:
            arrays = [self.host.hold(self.beside(cache), each, "dense", current).array for each in (*rows, order)]
            pools = [cache.pools[name] for name in ("key", "value")]
            key, value, slots_array = arrays
            key_cache, value_cache = (pool.array for pool in pools)
            options: dict[str, Any] = {"stream": self.given(cache), "kernels": self.host.kernels}
            append_to_cache(key, value, key_cache, value_cache, slots_array, **options)
        for pool, values in zip(pools, rows, strict=True):
            serving.append(values, pool.view, order, None)
            pool.stream = handle_of(cache.stream)
            if cache.place in (FOREIGN, DEVICE):
                pool.array.stream = pool.stream

    def beside(self, cache: Cache) -> str:
        """Returns where arrays of integers beside a cache are."""
        return FOREIGN if cache.place == DEVICE else cache.place

    @contextmanager
    def on_cache(self, cache: Cache) -> Iterator[int]:
        """Context manager in which arrays beside a cache are made and its calls launched; yields the handle."""
        with self.on(cache.stream if cache.place in LIBRARIES else None):
            yield handle_of(cache.stream)

    def given(self, cache: Cache) -> Any:
        """Returns the option stream of the cache's calls."""
        return None if cache.place in LIBRARIES else handle_of(cache.stream)

    def decoded(self, cache: Cache, queries: int, bottom_right: bool, in_parts: bool) -> None:
        """Attends to the cache, and expects what the reference computes of the model's pools."""
        capacity = cache.table.shape[1] * PAGE
        mask = "causal_br" if bottom_right else "full"
        sizes = {"queries": queries, "capacity": capacity, "mask": mask}
        case = Case.parse(f"forward {CACHE.format(first=cache.lengths[0], second=cache.lengths[1], **sizes)}")
        cache.drawn += 1
        query = np.random.default_rng(cache.drawn).standard_normal((2, queries, HEADS, COLUMNS), dtype=np.float32)
        query = query.astype(numpy_dtype("bfloat16"))
        pools = {name: pool.view.copy() for name, pool in cache.pools.items()}
        used = np.array(cache.lengths, np.int32)
        layout = paged.PageTable(page_table=cache.table, seqused_k=used)
        truth, low = (
            dict(
                zip(
                    ("output", "logsumexp"),
                    paged.forward(
                        query, pools["key"], pools["value"], layout, mask=case.spec.mask, precision=precision
                    ),
                    strict=True,
                )
            )
            for precision in ("float64", "bfloat16")
        )
        expected = guarded_check.Expected({"query": query, **pools}, truth, low)
        pages = [length // PAGE // 2 + 1 for length in cache.lengths] if in_parts else [0, 0]
        cut = np.minimum(np.array(pages, np.int32) * PAGE, used) if in_parts else np.zeros(2, np.int32)
        parts = [(cache.table, cut), (_rolled(cache.table, pages), used - cut)] if in_parts else [(cache.table, used)]
        with self.on_cache(cache) as current:
            held = self.host.hold(cache.place, query, "dense", current)
            options: dict[str, Any] = {
                "mask": case.spec.mask, "stream": self.given(cache), "kernels": self.host.kernels
            }  # fmt: skip
            found: list[Any] = []
            for table, lengths in parts:
                given = [self.host.hold(self.beside(cache), each, "dense", current).array for each in (table, lengths)]
                arrays = held.array, cache.pools["key"].array, cache.pools["value"].array
                found += attention_forward(*arrays, sequences=Paged(*given), **options)
            if in_parts:
                del options["mask"]
                found = list(merge_states(*found, **options))
        check = functools.partial(ratios, case, expected, True)
        results = dict(zip(("output", "logsumexp"), found, strict=True))
        label = f"{'merged ' if in_parts else ''}decode, {cache.place}, stream {handle_of(cache.stream):#x}"
        self.pending.append(Pending(f"{label}: {case.line}", handle_of(cache.stream), results, {}, check))

    def compare(self, pending: list[Pending]) -> None:
        """Compares results whose stream was waited for."""
        self.expect_none(self.host.faults())
        for each in pending:
            self.pending.remove(each)
            found = {name: self.host.result(array) for name, array in each.results.items()}
            for name, held in each.targets.items():
                self.expect_gaps(held, f"{name} of {each.label}")
            worst = each.check(found)
            if not all(ratio <= 1 for ratio in worst.values()):
                self.fail(f"error / allowed {dict(worst)}: {each.label}")
            self.tally.worst = max(self.tally.worst, *worst.values())
            self.tally.results += len(found)
            for name, array in found.items() if each.key else ():
                digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                assert each.key is not None
                first = self.tally.bits.setdefault((*each.key, name), digest)
                if digest != first:
                    self.fail(f"{name} has other bits than before: {each.label}")

    def expect_gaps(self, held: Held, name: str) -> None:
        """Expects every element around an array to be as it was."""
        found, gaps = self.host.read(held), held.gaps
        if found[gaps].tobytes() != held.image[gaps].tobytes():
            self.fail(f"{name}: elements around it changed")

    def expect_image(self, held: Held, name: str) -> None:
        """Expects every element of a storage to be as it was."""
        if self.host.read(held).tobytes() != held.image.tobytes():
            self.fail(f"{name}: its contents changed")

    def expect_none(self, faults: list[str]) -> None:
        """Expects the host to report nothing."""
        if faults:
            self.fail("; ".join(faults))

    def fail(self, text: str) -> NoReturn:
        """Ends the sequence. Hypothesis repeats it, and may then see another failure, or none: the tally has this."""
        self.has_failed = True
        self.tally.failures.append(text)
        raise AssertionError(text)


FLOAT32: Final = ("logsumexp", "grad_sinks")


def _rolled(table: Array, pages: list[int]) -> Array:
    """Returns a table whose rows start with another page."""
    return np.stack([np.roll(row, -first) for row, first in zip(table, pages, strict=True)])


@functools.cache
def bound_of(line: str, kernels: Any) -> Bound:
    """Returns the kernels of a case, bound once in a process."""
    return bind_problem(Case.parse(line).problem(), kernels)


def ratios(case: Case, expected: guarded_check.Expected, is_call: bool, found: dict[str, Array]) -> dict[str, float]:
    """Returns error / allowed by result. is_call: rows of no sequence must be 0, which only calls write."""
    found = {name: array.copy() for name, array in found.items()}
    if case.spec.sequences and not case.spec.page_size and is_call:
        for name, array in found.items():
            if name not in FLOAT32:
                unused = array[:, case.spec.num_tokens[name in ("grad_key", "grad_value")] :]
                unused[...] = np.where(unused == 0, np.nan, np.inf)
    return guarded_check.ratios(case, expected, found)
