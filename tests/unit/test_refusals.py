"""Tests of refusals: how values of every kind are written, and what a refusal and its error say."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.errors import AttentionError, DoesNotFit, NotSupported
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.refusals import Refusal, alignment_refusal, one_of, refuse, sentence, shown
from tests.support.fakes import DLPackArray


class OnDevice(DLPackArray):
    """A 0-d array of another library in device memory."""

    dtype, shape = "torch.int64", ()


class Unprintable:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise OSError("no repr")


SHOWN: dict[str, tuple[Any, str]] = {
    "None": (None, "None"),
    "bool": (True, "True"),
    "int": (7, "7 (int)"),
    "huge int": (10**5000, "a value that cannot be printed (int)"),
    "float": (2.5, "2.5 (float)"),
    "nan": (float("nan"), "nan (float)"),
    "infinity": (float("-inf"), "-inf (float)"),
    "str": ("7", "'7' (str)"),
    "quotes": ("it's", '"it\'s" (str)'),
    "both quotes": ('it\'s "a"', "'it\\'s \"a\"' (str)"),
    "lines": ("a\n  b", r"'a\n b' (str)"),
    "long str": ("x" * 100, f"'{'x' * 76}... (str)"),
    "bytes": (b"7", "b'7' (bytes)"),
    "shape": ((2, 3), "(2, 3)"),
    "no shape": ((), "() (tuple)"),
    "tuple": ((2, "3"), "(2, '3') (tuple)"),
    "bools": ((True, 3), "(True, 3) (tuple)"),
    "huge shape": ((10**5000, 3), "a value that cannot be printed"),
    "list": ([1], "[1] (list)"),
    "class": (np.float16, "<class 'numpy.float16'> (type)"),
    "object of this package": (Causal(3), "Causal(window_size=3) (cutlass_py_attn.problem.masks.Causal)"),
    "NumPy int": (np.int64(7), "np.int64(7) (numpy.int64)"),
    "NumPy bfloat16": (ml_dtypes.bfloat16(0.5), "0.5 (ml_dtypes.bfloat16)"),
    "array": (np.zeros((2, 3), "f2"), "array of shape (2, 3) and dtype float16 (numpy.ndarray)"),
    "0-d array": (np.array(2), "array of shape () and dtype int64 (numpy.ndarray)"),
    "masked array": (np.ma.zeros(2, "f4"), "array of shape (2,) and dtype float32 (numpy.ma.MaskedArray)"),
    "array on a device": (
        OnDevice(None, (2, 0)),
        "array of shape () and dtype torch.int64 on a device (tests.unit.test_refusals.OnDevice)",
    ),
    "layout": (Tensor.contiguous((2, 3), "float16"), "array of shape (2, 3) and dtype float16"),
    "unprintable": (Unprintable(), "a value that cannot be printed (tests.unit.test_refusals.Unprintable)"),
}


@pytest.mark.parametrize(("value", "text"), SHOWN.values(), ids=SHOWN)
def test_shown_values(value: Any, text: str) -> None:
    assert shown(value) == refuse("x", value, "", "").value == text


def test_a_sentence_says_what_was_given_what_is_allowed_and_what_to_do() -> None:
    refusal = refuse("scale", "2", "must be a number", "pass a float")
    assert refusal == Refusal("scale", "'2' (str)", "must be a number", "pass a float")
    assert str(refusal) == "scale = '2' (str): must be a number; pass a float"
    assert str(sentence("SASS needs nvdisasm")) == "SASS needs nvdisasm"
    assert one_of(("a", "b")) == "must be one of a, b"
    assert str(alignment_refusal("key", 2, 4)) == (
        "key.alignment = 2 (int): its address must be a multiple of the 4 bytes of an element (of 16 is fastest); "
        "copy it"
    )


@pytest.mark.parametrize(
    ("field", "name"),
    [("key", "key"), ("key.shape", "key"), ("seqused_k[3]", "seqused_k"), ("batch of query", "query"), ("", ""),
     ("on the rows of 2 ranks: grad_key.strides", "grad_key")],
)  # fmt: skip
def test_the_argument_of_a_field(field: str, name: str) -> None:
    assert refuse(field, 1, "", "").name == name


@pytest.mark.parametrize("kind", [NotSupported, DoesNotFit])
def test_errors_have_refusals_and_their_sentences(kind: type[NotSupported | DoesNotFit]) -> None:
    first, second = refuse("key", 1, "must be 2", "pass 2"), sentence("key is not here")
    error = kind([first, "key is not here"])
    assert isinstance(error, (AttentionError, ValueError))
    assert error.refusals == (first, second)
    assert error.reasons == ("key = 1 (int): must be 2; pass 2", "key is not here")
    assert str(error) == "\n".join(error.reasons)
    assert kind(first).refusals == (first,)
    assert kind("key is not here").refusals == (second,)
    renamed = error.renamed(lambda text: text.replace("key", "cache"))
    assert type(renamed) is kind
    assert renamed.reasons == ("cache = 1 (int): must be 2; pass 2", "cache is not here")
    again = pickle.loads(pickle.dumps(error))
    assert (again.refusals, str(again)) == (error.refusals, str(error))
