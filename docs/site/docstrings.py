"""How docstrings are read for the reference: arguments that share a line (`low, high: the limits`) are shown one by one,
examples as code, and attributes of the Trainer that are declared with a description have it as their docstring.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, ExprCall, ExprSubscript, Extension, Function, Object

ARGUMENTS = re.compile(r"^Args:\n(?: +.*\n|\n)+", re.MULTILINE)
SHARED = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): ((?:.*\n)(?:\1 +.*\n)*)", re.MULTILINE)
DECLARED = ("Forwarded", "Setting")
REFUSED = ("by_position", "unknown")
"""Arguments that exist to be refused with a good message."""
EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n)*", re.MULTILINE)


class PlainDocstrings(Extension):
    """Gives the parser of docstrings and Markdown the form that they know."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = ARGUMENTS.sub(lambda section: one_by_one(section[0]), obj.docstring.value + "\n")
            obj.docstring.value = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}```\n", text).rstrip()

    def on_function_instance(self, *, func: Function, **kwargs: Any) -> None:
        for name in REFUSED:
            if name in func.parameters:
                del func.parameters[name]

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Describe an attribute such as `name = Forwarded[int]("path", "What it is.")`."""
        kind = attr.value.function if isinstance(attr.value, ExprCall) else None
        if isinstance(attr.value, ExprCall) and isinstance(kind, ExprSubscript) and str(kind.left) in DECLARED:
            attr.annotation = kind.slice
            attr.docstring = Docstring(ast.literal_eval(str(attr.value.arguments[1])), parent=attr)


def one_by_one(section: str) -> str:
    """Return the section with a line for each argument."""
    return SHARED.sub(lambda line: "".join(f"{line[1]}{name}: {line[3]}" for name in line[2].split(", ")), section)
