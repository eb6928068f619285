"""What the command line makes of the machine it runs on."""

from __future__ import annotations

import pytest

from hf_heterospec import machine


@pytest.mark.parametrize(("multiplies", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_the_dtype_this_machine_is_fast_in(monkeypatch, multiplies, dtype):
    """On a processor without bf16 products a corpus in bf16 once came at 11 tokens per second, in fp32 at 100."""
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda device: multiplies)
    assert machine.resolve_dtype("auto", "cpu") == dtype
    assert machine.resolve_dtype("float16", "cpu") == "float16"
