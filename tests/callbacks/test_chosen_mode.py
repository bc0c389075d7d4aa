"""Which value of a metric is the better one, where no mode is given."""

from __future__ import annotations

import pytest

import trainwright as tw


@pytest.mark.parametrize("callback", [tw.ModelCheckpoint, tw.EarlyStopping])
@pytest.mark.parametrize("monitor", ["val_acc", "test/f1_score", "auroc"])
def test_a_metric_that_should_be_high_needs_a_mode(callback: type, monitor: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"{callback.__name__}\(monitor='{monitor}'\) keeps the lowest value.*pass mode='max'"
    ):
        assert callback(monitor=monitor).mode == "min"
    assert callback(monitor=monitor, mode="min").mode == "min"
    assert callback(monitor=monitor, mode="max").mode == "max"


@pytest.mark.parametrize("monitor", ["val_loss", "score", "perplexity", "reward"])
def test_other_metrics_do_not(monitor: str) -> None:
    assert tw.ModelCheckpoint(monitor=monitor).mode == tw.EarlyStopping(monitor=monitor).mode == "min"


def test_a_mode_that_there_is_not() -> None:
    for make in (tw.ModelCheckpoint, tw.EarlyStopping):
        with pytest.raises(ValueError, match="mode='best' is unknown; choose from min, max"):
            make(monitor="val_loss", mode="best")
