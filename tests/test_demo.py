"""The command line as users meet it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hf_heterospec import demo
from hf_heterospec.cli import main


def test_demo_json_is_one_object_and_the_outputs_are_equal(capsys):
    assert main(["demo", "--json", "--eager", "--max-new-tokens", "24"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] is True
    assert result["first_difference"] is None
    assert result["new_tokens"] == 24
    assert result["tau"] > 1
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert {"verified_tokens", "rounds", "tiers", "answer"} <= set(result)


def test_demo_streams_the_answer_and_warns_of_nothing():
    command = [sys.executable, "-m", "hf_heterospec.cli", "demo", "--eager", "--max-new-tokens", "16"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0
    assert "equal: yes" in result.stdout
    assert "speed-up" in result.stdout
    assert "warn" not in (result.stdout + result.stderr).lower()


def test_demo_fails_when_outputs_differ(capsys, monkeypatch):
    timed = demo._timed

    def one_wrong_token(model, inputs, head, **kwargs):
        ids, seconds = timed(model, inputs, head, **kwargs)
        if head is not None and kwargs["max_new_tokens"] == 12:
            ids[0, -3] += 1
        return ids, seconds

    monkeypatch.setattr(demo, "_timed", one_wrong_token)
    assert main(["demo", "--eager", "--max-new-tokens", "12"]) == 1
    assert "equal: no (new token 10" in capsys.readouterr().out


def test_wrong_arguments_exit_with_2(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--dtype", "float8"])
    assert exit_info.value.code == 2
    assert "float8" in capsys.readouterr().err
