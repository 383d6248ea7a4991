"""Tests of bad calls: every public function refuses them by the package's errors, and launches nothing."""

from __future__ import annotations

import re

import pytest

from cutlass_py_attn.errors import AttentionError, NotSupported
from cutlass_py_attn.runtime import driver
from tests.support import bad_calls, bad_serving_calls
from tests.support.bad_calls import BadCall
from tests.support.fake_driver import FakeDriver

CALLS = [*bad_calls.all_calls(), *bad_serving_calls.all_calls()]
# What was given, what is allowed and what to do.
REASON = re.compile(r"(?s).+?(: | must ).+; .+")


def test_the_table_is_large_and_has_no_call_twice() -> None:
    names = [bad.name for bad in CALLS]
    assert len(names) == len(set(names)) >= 200


@pytest.mark.parametrize("bad", CALLS, ids=lambda bad: bad.name)
def test_bad_call(driver_log: FakeDriver, bad: BadCall) -> None:
    driver.device(0)
    bad.prepare()
    driver_log.clear()
    with pytest.raises(AttentionError) as caught:
        bad.call()
    error = caught.value
    if isinstance(error, NotSupported):
        assert bad.field in {name for refusal in error.refusals for name in (refusal.field, refusal.name)}, error
        assert all(refusal.value and refusal.rule and refusal.remedy for refusal in error.refusals), error
    else:
        assert bad.field in str(error)
        assert REASON.fullmatch(str(error))
    assert driver_log.names == []
