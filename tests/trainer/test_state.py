"""The state of a run, on its way to another process."""

from __future__ import annotations

from trainwright.checkpoint.codec import decode, encode
from trainwright.trainer.run_position import OpenEpoch, Position


def test_the_state_is_restored_from_plain_data() -> None:
    epoch = OpenEpoch({"loss": 1.0}, {"values": []}, [{"rows": 3}], {"Timer": {"time": 2.0}})
    for state in (
        Position(),
        Position(epoch=2, batch=3, step=9, open_epoch=epoch, rng={"epoch left": {"python": [1, 2]}}),
    ):
        plain = decode(*encode(state.plain(), "state"))
        again = Position.of_plain(plain)
        assert again.plain() == state.plain()
        assert again.open_epoch == state.open_epoch
