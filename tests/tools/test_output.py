"""The command line whose output's reader has gone, as after `| head`."""

from __future__ import annotations

import os
import sys

import pytest

from trainwright import __main__


def test_a_lost_reader_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "argv", ["trainwright", "env", "--json"])
        assert __main__.main() == 141
        output.write("the interpreter flushes once more when it ends")
