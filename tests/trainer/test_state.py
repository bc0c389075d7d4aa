"""The state of a run, on its way to another process."""

from __future__ import annotations

from trainwright.checkpoint.codec import decode, encode
from trainwright.trainer.state import OpenEpoch, TrainerState


def test_the_state_is_restored_from_plain_data() -> None:
    epoch = OpenEpoch({"loss": 1.0}, {"values": []}, [{"rows": 3}], {"Timer": {"time": 2.0}}, {"python": [1, 2]})
    for state in (TrainerState(), TrainerState(epoch=2, batch=3, step=9, open_epoch=epoch)):
        plain = decode(*encode(state.plain(), "state"))
        again = TrainerState.of_plain(plain)
        assert again.plain() == state.plain()
        assert again.open_epoch == state.open_epoch
