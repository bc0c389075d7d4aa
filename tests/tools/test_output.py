"""The command line whose output's reader has gone, as after `| head`."""

from __future__ import annotations

import os
import sys

import pytest

from trainwright import __main__
from trainwright.tools.environment_report import env_command


@pytest.mark.parametrize("arguments", [["env", "--json"], ["--help"]])
def test_a_lost_reader_ends_the_command_quietly(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "argv", ["trainwright", *arguments])
        assert __main__.main() == 141
        output.write("the interpreter flushes once more when it ends")


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise BrokenPipeError("of another connection")

    monkeypatch.setattr(f"{env_command.__module__}.env_command", broken)
    monkeypatch.setattr(sys, "argv", ["trainwright", "env"])
    with pytest.raises(BrokenPipeError, match="of another connection"):
        __main__.main()
