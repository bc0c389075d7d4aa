"""Curves: axes, panels, legends, gaps, and how long curves are thinned out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from html_page import LOADING, Page

from trainwright.history import History, Series
from trainwright.plots import draw, names_of_runs, panels_of
from trainwright.plots.curves import line_of, log_ticks, smoothed

ODD = ("_first", "$x_{", "<script>alert(1)</script>", "a&b\"'", "\u540d\u524d", "line\nbreak\x1b[31m", "with, comma")


def history(folder: str = "runs/a", epochs: Any = (), **series: Any) -> History:
    made = {}
    for name, values in series.items():
        values = np.asarray(values, float)
        made[name] = Series(np.arange(len(values), dtype=float), values)
    return History(folder, made, np.asarray(epochs, float).reshape(-1, 2))


def test_metrics_are_grouped_in_panels() -> None:
    names = (
        *("train_loss_step", "train_loss_epoch", "val_loss", "loss", "g_loss", "nll/loss", "FocalLoss", "glossary"),
        *("train_acc", "val_acc", "val_acc/dataloader_idx_1", "f1", "lr-Adam", "lr-Adam/pg1", "lr-Adam-momentum"),
        *("train/samples_per_sec", "train/device/samples_per_sec", "train/device/mfu", "hp_metric"),
    )
    found = {
        (panel.group, panel.title): {curve.metric for curve in panel.curves}
        for panel in panels_of([history(**{name: [1, 2] for name in names})])
    }
    assert list(dict.fromkeys(group for group, _ in found)) == ["Loss", "Metrics", "Learning rate", "Throughput"]
    assert found["Loss", "loss"] == {*names[:7]}
    assert found["Metrics", "acc"] == {"train_acc", "val_acc", "val_acc/dataloader_idx_1"}
    assert found["Metrics", "glossary"] == {"glossary"}
    assert found["Learning rate", "learning rate"] == {"lr-Adam", "lr-Adam/pg1"}
    assert found["Learning rate", "lr-Adam-momentum"] == {"lr-Adam-momentum"}
    assert found["Throughput", "samples_per_sec"] == {"train/samples_per_sec", "train/device/samples_per_sec"}
    assert "hp_metric" not in set().union(*found.values())


def test_a_stage_has_one_color_in_all_panels() -> None:
    names = (
        "val_loss", "train_loss_step", "train_loss_epoch", "acc/train", "acc/val", "test_acc", "lr-Adam",
        "lr-Adam/pg1", "f1",
    )  # fmt: skip
    looks = {
        curve.metric: (curve.color, curve.dash)
        for panel in panels_of([history(**{name: [1, 2] for name in names})])
        for curve in panel.curves
    }
    assert looks == {
        "val_loss": (1, 0), "train_loss_step": (0, 0), "train_loss_epoch": (0, 1), "acc/train": (0, 0), "acc/val": (1, 0),
        "test_acc": (2, 0), "lr-Adam": (0, 0), "lr-Adam/pg1": (3, 0), "f1": (0, 0),
    }  # fmt: skip


def test_a_panel_has_a_log_axis_for_its_positive_values_and_smooth_curves() -> None:
    values = np.array([100.0, 10, np.nan, 1, 0, -1])
    (panel,) = panels_of([history(loss=values)])
    logarithmic = panel.logarithmic()
    assert logarithmic is not None
    assert np.nan_to_num(logarithmic.curves[0].y, nan=-9).tolist() == [2, 1, -9, 0, -9, -9]
    assert [round(10**each, 6) for each in log_ticks(*logarithmic.y_range)] == [1, 2, 5, 10, 20, 50, 100]
    assert [round(10**each, 9) for each in log_ticks(-4.1, 3.2)] == [10.0**power for power in range(-4, 4)]
    assert np.nan_to_num(smoothed(panel.curves[0]).y, nan=-9).tolist() == [55, 55, -9, 0.5, 0, -0.5]
    (negative,) = panels_of([history(loss=[-1.0, 0.0])])
    assert negative.logarithmic() is None
    page = draw([history(loss=values)]).decode()
    assert (page.count('class="log"'), page.count('class="smooth"')) == (1, 2)
    assert 'class="log"' not in draw([history(loss=[-1.0])]).decode()


def test_several_runs_have_colors_and_short_names() -> None:
    runs = [history("/logs/one/version_0", loss=[1], only=[2]), history("/logs/two/version_0", loss=[3], val_loss=[4])]
    loss, only = panels_of(runs)
    assert [(curve.label, curve.color, curve.dash) for curve in loss.curves] == [
        ("one/version_0: loss", 0, 0),
        ("two/version_0: loss", 1, 0),
        ("two/version_0: val_loss", 1, 1),
    ]
    assert [curve.label for curve in only.curves] == ["one/version_0: only"]
    assert names_of_runs(["/a/b/version_0"]) == ["b/version_0"]
    assert names_of_runs(["/a/b", "/a/b/c"]) == ["b", "b/c"]
    page = draw(runs).decode()
    assert "Curves of 2 runs" in page
    assert "/logs/two/version_0" in page


def test_curves_can_be_drawn_over_epochs() -> None:
    steps = np.array([0.0, 5, 10, 15, 20, 25])
    epochs = np.array([[5, 0], [10, 0], [20, 1], [25, 2]])
    series = Series(steps, steps)
    run = History("run", {"loss": series, "early": Series(steps[:1], steps[:1])}, epochs)
    assert run.x_of(series, "step").tolist() == steps.tolist()
    # An epoch has ten steps. The last epoch counts as long as the previous one.
    assert run.x_of(series, "epoch").tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert (run.last_step, run.last_epoch) == (25, 2)
    with pytest.raises(ValueError, match="has no epochs"):
        draw([history(loss=[1.0])], axis="epoch")
    with pytest.raises(ValueError, match=r"x='batch' is unknown; choose from step, epoch"):
        draw([history(loss=[1.0])], axis="batch")


def test_unknown_metrics_are_rejected() -> None:
    with pytest.raises(ValueError, match="nothing to draw: runs/a has no rows"):
        draw([history()])
    with pytest.raises(ValueError, match=r"'val_los' was not logged; choose from val_loss\. Did you mean 'val_loss'\?"):
        draw([history(val_loss=[1.0])], ["val_los"])
    with pytest.raises(TypeError, match="Pass a list of the names"):
        draw([history(val_loss=[1.0])], "val_loss")


def test_values_that_are_not_finite_are_gaps() -> None:
    nan, inf = float("nan"), float("inf")
    (panel,) = panels_of([history(loss=[nan, 1, 2, nan, 3, inf, -inf, 1e308, 4, 5])])
    (curve,) = panel.curves
    assert curve.label == "loss (5 not finite)"
    assert [ys.tolist() for _, ys in line_of(curve, panel.x_range, 100)] == [[1, 2], [3], [4, 5]]
    page = draw([history(loss=[nan, 1, 2, nan, 3, inf])]).decode()
    assert "loss (3 not finite)" in page
    assert page.count('r="2.5"') == 4  # the lone point: on both axes, as it is and smooth
    assert "nan" not in re.sub(r"<title>.*?</title>", "", page)


def test_long_curves_keep_their_peaks() -> None:
    rng, count, columns = np.random.default_rng(0), 200_000, 500
    values = rng.standard_normal(count)
    values[77_777], values[123_456] = 50.0, -60.0
    values[100_000:110_000] = np.nan
    (panel,) = panels_of([history(loss=values)])
    (curve,) = panel.curves
    line = line_of(curve, panel.x_range, columns)
    xs, ys = (np.concatenate(each) for each in zip(*line, strict=True))
    assert len(xs) < len(curve.x)
    assert len(xs) <= 4 * columns
    assert (np.diff(xs) > 0).all()
    assert (values[xs.astype(int)] == ys).all()
    assert (ys.max(), ys.min(), xs[0], xs[-1]) == (50.0, -60.0, 0, count - 1)
    # The extremes of all columns are drawn.
    column = (np.arange(count) / (count - 1) * columns).astype(int).clip(0, columns - 1)
    drawn = (xs / (count - 1) * columns).astype(int).clip(0, columns - 1)
    for each in (0, 200, columns - 1):
        assert np.nanmax(values[column == each]) == ys[drawn == each].max()
    assert not any((part >= 100_000).any() and (part < 100_000).any() for part, _ in line)
    page = draw([history(loss=values)]).decode()
    assert "(up to 200,000 points)" in page
    assert "smallest, largest and last value in 564 columns" in page
    assert len(page) < 120_000
    assert sum(len(part) for part, _ in line_of(curve, panel.x_range, count)) == count - 10_000  # without the gap


def test_the_page_is_self_contained_and_escapes_names() -> None:
    runs = [
        history(f"/logs/<img src=x onerror=alert(1)>/{each}", **{name: [1, each] for name in ODD}) for each in (1, 2)
    ]
    page = draw([*runs]).decode()
    found = Page(page)
    assert not found.open
    assert found.names == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "ul", "input", "label", "li", "span", "div"),
        *("figure", "figcaption", "svg", "g", "line", "text", "path", "rect"),
    }
    assert not found.attributes & LOADING
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    for name in ODD[:5]:
        assert name in found.text
    assert "line\\nbreak\\x1b[31m" in found.text
    assert "\x1b" not in page
    assert "1: _first = 1 at step 1\n2: _first = 2 at step 1" in found.text  # the text under the pointer
