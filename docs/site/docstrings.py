"""How docstrings are read for the reference: arguments that share a line (`low, high: the limits`) are shown one by one, and
examples as code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ARGUMENTS = re.compile(r"^Args:\n(?: +.*\n|\n)+", re.MULTILINE)
SHARED = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): ((?:.*\n)(?:\1 +.*\n)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n)*", re.MULTILINE)


class PlainDocstrings(Extension):
    """Gives the parser of docstrings and Markdown the form that they know."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = ARGUMENTS.sub(lambda section: one_by_one(section[0]), obj.docstring.value + "\n")
            obj.docstring.value = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}```\n", text).rstrip()


def one_by_one(section: str) -> str:
    """Return the section with a line for each argument."""
    return SHARED.sub(lambda line: "".join(f"{line[1]}{name}: {line[3]}" for name in line[2].split(", ")), section)
