"""Tests of examples/serving_numpy.py: on the CPU by the reference, and its launches with the fake driver."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact

PATH = Path(__file__).resolve().parents[2] / "examples/serving_numpy.py"
LARGEST = 0.02  # difference of outputs up to 5 that are rounded to bfloat16


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example as a module of its own."""
    spec = importlib.util.spec_from_file_location("serving_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serving_example", module)
    spec.loader.exec_module(module)
    return module


def test_conversations_are_those_of_float64(example: Any) -> None:
    found = example.main(**example.SMALL, backend="reference")
    assert found.steps > found.decode_steps > 0
    assert found.most_running < example.SMALL["conversations"]
    assert found.output_error < LARGEST
    assert found.behind <= 2 * found.logit_error < 2 * LARGEST
    assert found.tokens > 3 * example.SMALL["conversations"]


@pytest.mark.parametrize("wrong", ["row of the cache", "length", "page"])
def test_a_wrong_step_is_seen(example: Any, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append, attend = example.append_to_cache, example.attention_forward

    def append_wrongly(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **options: Any) -> None:
        append(key, value, key_cache, value_cache, np.where(slots > 0, slots ^ 1, slots), **options)

    def attend_wrongly(*operands: Any, sequences: Any = None, **options: Any) -> Any:
        if sequences is not None:
            lengths, table = sequences.seqused_k, sequences.page_table
            changed = {"seqused_k": lengths - (lengths > 1)} if wrong == "length" else {"page_table": table[:, ::-1]}
            sequences = example.Paged(**{"page_table": table, "seqused_k": lengths} | changed | rest(sequences))
        return attend(*operands, sequences=sequences, **options)

    def rest(sequences: Any) -> dict[str, Any]:
        return {"cu_seqlens_q": sequences.cu_seqlens_q, "max_seqlen_q": sequences.max_seqlen_q}

    if wrong == "row of the cache":
        monkeypatch.setattr(example, "append_to_cache", append_wrongly)
    else:
        monkeypatch.setattr(example, "attention_forward", attend_wrongly)
    assert example.main(**example.SMALL, backend="reference").output_error > 50 * LARGEST


def test_pages_are_free_when_nobody_uses_them(example: Any) -> None:
    pool = example.PagePool(5)
    pages = pool.take(3)
    pool.share(pages[:2])
    pool.release(pages)
    assert sorted(pool.free) == sorted({*range(5)} - {*pages[:2]})
    pool.release(pages[:2])
    assert sorted(pool.free) == list(range(5))


def test_a_conversation_that_no_cache_holds_is_refused(example: Any) -> None:
    sizes = example.SMALL["sizes"]
    engine = example.Engine(example.Model(sizes), sizes, backend="reference")
    engine.add(example.Conversation([1] * 30, wanted=6))
    with pytest.raises(ValueError, match="a conversation of 10 pages: must be at most 9"):
        engine.add(example.Conversation([1] * 30, wanted=7))


def test_a_decode_step_is_one_launch_of_a_graph(
    example: Any, graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake driver computes nothing: the outputs stay what they were."""
    call = example.cuda_call
    events = {"cuEventCreate": 1, "cuEventRecord": None, "cuEventElapsedTime": 0.25}
    monkeypatch.setattr(example, "cuda_call", lambda name, *rest: events[name] if name in events else call(name, *rest))
    sizes = example.Sizes(
        4, 2, 64, 64, batch=5, tokens=128, num_pages=30, page_size=16, max_pages=9, prefix=16
    )  # of the sm90 family too
    monkeypatch.setattr(example, "compare", lambda model, conversation: (0.0, 0.0, np.zeros(1)))
    found = example.main(conversations=7, prompt=60, wanted=6, sizes=sizes, kernels=artifact)
    assert found.replay_us == 250
    replays = graphs.of("cuGraphLaunch")
    assert len(replays) == found.decode_steps > 0
    begin = graphs.names.index("cuStreamBeginCapture")
    capture = graphs.names[begin : graphs.names.index("cuStreamEndCapture")]
    assert capture.count("cuLaunchKernelEx") == 3  # the append, and two kernels of the decode
    packed = [call for call in graphs.of("cuLaunchKernelEx") if "varlen" in call.text]
    assert len(packed) == found.steps - found.decode_steps + 1  # and the step of the prefix
