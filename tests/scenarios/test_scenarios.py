"""The golden transcripts are what happens. `--rewrite-scenarios` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sim_scenario import Scenario

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_transcript(file, request):
    text = file.read_text()
    transcript = Scenario().transcript(text)
    if request.config.getoption("--rewrite-scenarios"):
        file.write_text(transcript)
    else:
        assert transcript == text


def test_a_script_that_cannot_be_followed_fails():
    with pytest.raises(StopIteration):
        Scenario().transcript("> schedule r1\n")
