"""Decisions: what rank 0 decides for all, since what the ranks see of metrics, clocks and files may differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainwright.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.engine.engine import Engine


def decided(engine: Engine, call: str, decide: Callable[[], Any]) -> Any:
    """Return, on every rank, what `decide` returns on rank 0, where alone it is called. Collective: call on every rank.

    `call` names the decision, for the error of ranks that have come to different calls. `decide` returns what json can hold.
    What raises there anything else than these ends the job as a failed rank does.

    Raises:
        ValueError, CheckpointError: on every rank alike, with rank 0's text.
    """
    said: dict[str, Any] = {}
    if engine.rank == 0:
        try:
            said = {"decision": decide()}
        except (ValueError, CheckpointError) as error:
            said = {"error": str(error), "is_of_checkpoint": isinstance(error, CheckpointError)}
    said = json.loads(engine.agreed(json.dumps(said), call))
    if "error" in said:
        raise (CheckpointError if said["is_of_checkpoint"] else ValueError)(said["error"])
    return said["decision"]
