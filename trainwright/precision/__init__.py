"""Precisions by name: the dtype that a step computes in, and the scale of its loss."""

from __future__ import annotations

import difflib

from trainwright.arguments import foreign_hint
from trainwright.errors import a_type_of
from trainwright.precision.base import Precision

NAMES = {
    "64-true": ("64", "double", "64-true"),
    "32-true": ("32", "32-true"),
    "16-mixed": ("16", "16-mixed"),
    "bf16-mixed": ("bf16", "bf16-mixed"),
    "16-true": ("16-true",),
    "bf16-true": ("bf16-true",),
    "fp8-mixed": ("fp8", "fp8-mixed"),
}
MIXED = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
"""The values of the Accelerator's mixed_precision=, and their precisions."""
OTHER_WORDS = {
    "fp64": "64-true",
    "float64": "64-true",
    "fp32": "32-true",
    "float32": "32-true",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "half": "16-true",
    "bfloat16": "bf16-mixed",
    "float8": "fp8-mixed",
}
"""Rejected names, and the suggestions for them."""
_SPELLED = {spelling: name for name, spellings in NAMES.items() for spelling in spellings}
_KNOWN = {**MIXED, **_SPELLED}


def canonical_name(word: str) -> str:
    """Return the name in `NAMES` for a spelling of the Trainer or the Accelerator (ValueError if neither accepts it)."""
    if word.lower() not in _KNOWN:
        raise _unknown(word, f"{', '.join(NAMES)}, 16, 32, 64, {', '.join(MIXED)}.")
    return _KNOWN[word.lower()]


def is_spelling_of(precision: str | int | Precision | None, word: str) -> bool:
    """Return whether a spelling means this precision."""
    name = precision.name if isinstance(precision, Precision) else _KNOWN.get(str(precision).lower())
    return name == canonical_name(word)


def _unknown(precision: str | int, accepted: str) -> ValueError:
    words = {**_SPELLED, **OTHER_WORDS}
    close = difflib.get_close_matches(str(precision).lower(), words, n=1, cutoff=0.6)
    hint = f" Did you mean {words[close[0]]!r}?" if close else ""
    return ValueError(f"precision={precision!r} is unknown; choose from {accepted}{hint}")


def resolve_precision(precision: str | int | Precision | None, device_type: str) -> Precision:
    """Return the precision for a name, a number of bits or an instance.

    Raises:
        ValueError: the name is unknown.
        TypeError: neither a name, a number nor a Precision.
    """
    if isinstance(precision, Precision):
        return precision
    if precision is None:
        precision = "32-true"
    if isinstance(precision, bool) or not isinstance(precision, (str, int)):
        raise TypeError(
            f"precision={precision!r} is {a_type_of(precision)}; expected a name, 16, 32, 64 or a Precision "
            f"instance. Choose from {', '.join(NAMES)}.{foreign_hint(precision)}"
        )
    wanted = str(precision).lower()
    if wanted not in _SPELLED:
        raise _unknown(precision, f"{', '.join(NAMES)} (16, 32 and 64 may be numbers), or pass a Precision instance.")
    name = _SPELLED[wanted]
    if name == "32-true":
        return Precision()
    if name == "fp8-mixed":
        from trainwright.precision.float8 import Float8Precision

        return Float8Precision(device_type)
    if name.endswith("-mixed"):
        from trainwright.precision.mixed import MixedPrecision

        return MixedPrecision(name, device_type)
    from trainwright.precision.single_dtype import SingleDtypePrecision

    return SingleDtypePrecision(name)


__all__ = ["MIXED", "NAMES", "Precision", "canonical_name", "is_spelling_of", "resolve_precision"]
