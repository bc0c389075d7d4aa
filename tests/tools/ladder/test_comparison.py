"""The comparison of rungs: the metric, the figures relative to the unchanged script, the choice and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from html_page import LOADING, Page
from rungs import attempt, record

from trainwright.metric_direction import direction_of
from trainwright.tools.ladder.advice import choice_lines, notes
from trainwright.tools.ladder.attempt import Attempt, RungRecord
from trainwright.tools.ladder.climb import printed_metrics, reason_of
from trainwright.tools.ladder.comparison import ComparedMetric, Comparison, choose_metric
from trainwright.tools.ladder.ladder_table import markdown_table, terminal_table, write_files

ACCURACY = ComparedMetric("test_acc", "trainer, test", "max")


def scored(name: str, rate: float, accuracy: float = 0.9, **changes: Any) -> Attempt:
    return attempt(name, samples_per_second=rate, metrics={"test": {"test_acc": accuracy}}, **changes)


def test_a_name_has_a_direction() -> None:
    for name in (
        "val_acc",
        "MulticlassAccuracy",
        "test/f1",
        "top5_accuracy",
        "test_auroc",
        "mIoU",
        "R2",
        "test accuracy (%)",
    ):
        assert direction_of(name) == "max", name
    for name in ("val_loss", "NLLLoss", "rmse", "word error", "perplexity"):
        assert direction_of(name) == "min", name
    for name in ("test_value", "accident", "beloved", "landmap"):
        assert direction_of(name) is None, name


def test_printed_metrics_are_read_from_the_output() -> None:
    lines = [
        "epoch 0: val_acc 0.8833, loss 0.4", "test accuracy: 91.42 %", "[rank1] test accuracy: 10 %",
        "test_acc=0.91 test_loss = 1e-3", "Test set took 5.2.1", "latest score 3", "The final test loss is 0.4.",
        "val_loss: nan",
    ]  # fmt: skip
    found = [(each.stage, each.name, each.value) for each in printed_metrics(lines)]
    assert found == [
        ("validation", "val_acc", 0.8833),
        ("test", "test accuracy (%)", 91.42),
        ("test", "test_acc", 0.91),
        ("test", "test_loss", 0.001),
        ("test", "test loss", 0.4),
        ("validation", "val_loss", pytest.approx(float("nan"), nan_ok=True)),
    ]


def test_the_metric_is_a_tests() -> None:
    both = {"test": {"test_loss": 0.4, "test_acc": 0.9}, "validation": {"train_loss": 0.3, "val_acc": 0.8}}
    assert choose_metric(attempt("a", metrics=both)) == ACCURACY
    assert choose_metric(attempt("a", metrics={"validation": both["validation"]})) == ComparedMetric(
        "val_acc", "trainer, validation", "max"
    )
    printed = {"test": {"test accuracy (%)": 91.0}}
    assert choose_metric(attempt("a", metrics={}, logged={"loss": 1.0}, printed=printed)) == ComparedMetric(
        "test accuracy (%)", "output, test", "max"
    )
    assert choose_metric(attempt("a", metrics={}, logged={"loss": 1.0})) is None
    assert choose_metric(attempt("a", metrics={}, logged={"loss": 1.0}), "loss") == ComparedMetric("loss", "log", "min")
    assert choose_metric(attempt("a", metrics={"test": {"test_x": 1.0}}), direction="min") == ComparedMetric(
        "test_x", "trainer, test", "min"
    )
    words = {"latest_loss": 1.0, "value_loss": 2.0, "interval": 3.0}  # of the training
    assert choose_metric(attempt("a", metrics={}, logged=words)) is None
    for name in ("testAcc", "final/test_acc"):
        assert choose_metric(attempt("a", metrics={}, logged={**words, name: 0.5})) == ComparedMetric(
            name, "log, test", direction_of(name)
        )
    for name in ("validLoss", "eval_loss", "loss/validation", "valloss"):
        found = choose_metric(attempt("a", metrics={}, logged={**words, name: 0.5}))
        assert found is not None
        assert (found.name, found.source) == (name, "log, validation")
    with pytest.raises(
        ValueError, match=r"--metric test_ac: the script has no such metric; it has .* Did you mean 'test_acc'"
    ):
        choose_metric(attempt("a", metrics=both), "test_ac")
    with pytest.raises(ValueError, match=r"--metric loss: .*; it logs no metric, and has none of a test"):
        choose_metric(attempt("a", metrics={}, logged={}), "loss")


def test_figures_are_relative_to_the_unchanged_script() -> None:
    quick = tuple((step, 0.05 * step) for step in range(1, 11))
    comparison = Comparison([scored("unchanged", 100.0), scored("ddp", 250.0, points=quick, steps=10)], ACCURACY)
    assert comparison.common_steps == 10
    assert [comparison.speed_up(each) for each in comparison.results] == [1.0, 2.5]
    seconds = [comparison.seconds_to_common(each) for each in comparison.results]
    assert seconds == [pytest.approx(1.5), pytest.approx(0.5)]
    unknown = Comparison([scored("unchanged", 100.0), attempt("ddp", samples_per_second=None)], None)
    assert not unknown.counts_samples
    assert unknown.speed_up(unknown.results[1]) == 1.0  # of batches


def test_the_choice_is_the_fastest_that_is_not_worse() -> None:
    first, good, bad = scored("unchanged", 100), scored("ddp", 150, 0.885), scored("fsdp", 200, 0.881)
    failed = attempt("deepspeed_stage_2", "failed", "exit code 1: ValueError: no")
    assert Comparison([first, good, bad, failed], ACCURACY).choice() is good
    assert Comparison([first, good, bad], None).choice() is bad
    assert Comparison([first, scored("ddp", 90)], ACCURACY).choice() is first
    assert Comparison([first, scored("ddp", 200, float("nan"))], ACCURACY).choice() is first
    without = Comparison([first, attempt("ddp", samples_per_second=200.0, metrics={})], ACCURACY)
    assert without.choice() is first
    assert list(choice_lines(without, ["a.py"])) == [
        "Keep the script unchanged: the faster rungs have a worse metric or none."
    ]
    lower = ComparedMetric("test_acc", "trainer, test", "min")
    assert Comparison([first, good, bad], lower).choice() is bad


def compared() -> Comparison:
    faster = {"devices": 2, "strategy": "ddp", "precision": "bf16-mixed", "compile": True}
    replaced = {"devices": ("1", "2"), "max_steps": ("-1", "20")}
    return Comparison(
        [
            scored("unchanged", 100),
            scored("ddp", 185, 0.91, facts={"processes": 2}, replaced=replaced, **faster),
            attempt("fsdp", "failed", "exit code 1: ValueError: it does not fit.", devices=2, strategy="fsdp"),
            attempt("deepspeed_stage_2", "skipped", "deepspeed is missing: pip install deepspeed"),
            attempt("ddp_sharded", "skipped", "fairscale is missing: pip install fairscale"),
            attempt("deepspeed_stage_3", "skipped", "deepspeed is missing: pip install deepspeed"),
        ],
        ACCURACY,
    )


def test_the_choice_is_shown_as_arguments_of_a_trainer() -> None:
    comparison = compared()
    first, *others = choice_lines(comparison, ["train.py"])
    assert first == (
        "Choose ddp, 1.85 times as fast as the unchanged script to the end of the training (2.59 s instead of 4.8 s); "
        "test_acc is 0.91, unchanged 0.9 (a difference up to 2% counts as noise)."
    )
    assert others == [
        '    tw.Trainer(devices=2, strategy="ddp", precision="bf16-mixed", compile=True)',
        "The script had devices=1.",
    ]
    said = list(notes(comparison, "cpu"))
    assert said[0] == (
        "fsdp failed: exit code 1: ValueError: it does not fit. Its output is in ladder/fsdp/output.log."
    )
    assert said[1:3] == [
        "deepspeed_stage_2 and deepspeed_stage_3 were skipped: deepspeed is missing: pip install deepspeed.",
        "ddp_sharded was skipped: fairscale is missing: pip install fairscale.",
    ]
    assert "their figures say nothing about several GPUs" in said[3]
    assert said[4] == "test_acc comes from the Trainer (test)."


def test_the_choice_is_shown_as_arguments_of_an_accelerator() -> None:
    faster = {"devices": 2, "strategy": "fsdp", "precision": "bf16-mixed", "compile": True, "owner": "Accelerator"}
    comparison = Comparison(
        [
            attempt("unchanged", is_cut=True),
            attempt("fsdp", samples_per_second=200.0, is_cut=True, **faster),
        ],
        None,
    )
    assert list(choice_lines(comparison, ["my train.py", "--lr", "1"]))[1:3] == [
        '    tw.Accelerator(devices=2, strategy="fsdp", mixed_precision="bf16", dynamo_backend="inductor")',
        "    trainwright launch --devices 2 'my train.py' --lr 1",
    ]
    on_cpu = Comparison(
        [attempt("unchanged"), attempt("fsdp", samples_per_second=200.0, accelerator="cpu", **faster)], None
    )
    assert list(choice_lines(on_cpu, ["train.py"]))[1:3] == [
        '    tw.Accelerator(accelerator="cpu", devices=2, strategy="fsdp", mixed_precision="bf16", dynamo_backend="inductor")',
        "    trainwright launch --cpu --devices 2 train.py",
    ]
    record = comparison.results[1].record
    assert record is not None
    record.replaced["precision"] = ("None", "'bf16-mixed'")
    assert "The script had" not in " ".join(choice_lines(comparison, ["train.py"]))  # it gave none
    said = " ".join(notes(comparison, "cuda"))
    assert "--steps ends a loop with an Accelerator before its test" in said
    assert "No run has a test or validation metric" in said


def test_the_choice_is_the_first_to_end() -> None:
    late = tuple((step, 240 + 0.05 * step) for step in range(1, 21))
    compiled = scored("compile", 424, points=late, seconds=250.0, steps_per_second=40.0, compile=True)
    comparison = Comparison([scored("unchanged", 100, seconds=4.6), compiled], None)
    assert comparison.choice() is comparison.first
    kept, late = choice_lines(comparison, ["train.py"])
    assert kept == "Keep the script unchanged: no other rung is 5% faster."
    assert late.startswith(
        "The first 20 steps of compile took 241 s, unchanged 2.5 s. Its start, such as compiling, pays"
    )
    assert late.endswith("off after 3,200 steps. Then it is 4.24 times as fast.")
    whole = [
        scored("unchanged", 100, seconds=2.5, planned_steps=10_020),
        scored("compile", 424, points=late, seconds=241.0, steps_per_second=40.0, compile=True, planned_steps=10_020),
    ]
    assert next(choice_lines(Comparison(whole, None), ["train.py"])).endswith(
        "2.04 times as fast as the unchanged script to the end of the training (491 s instead of 1,002 s)."
    )


def test_a_rung_whose_settings_the_script_has_is_not_chosen() -> None:
    same = scored("bf16-mixed", 150, replaced={"max_steps": ("-1", "20")})
    comparison = Comparison([scored("unchanged", 100), same], ACCURACY)
    assert comparison.choice() is comparison.first
    said = " ".join(notes(comparison, "cpu"))
    assert "The script already has the settings of bf16-mixed. Any difference between the two is noise." in said


def test_the_script_is_kept_for_a_reason() -> None:
    first, short = scored("unchanged", 100), scored("unchanged", 100, steps_per_second=11.0)
    too_short = "its steps took less than 2 s, which is too short to compare rungs; let it train for longer"
    for reason, results in (
        ("no other rung has finished", [first, attempt("ddp", "failed", "it broke")]),
        ("no other rung is 5% faster", [first, scored("ddp", 80), scored("compile", 104)]),
        ("the faster rungs have a worse metric or none", [first, scored("ddp", 180, 0.5)]),
        (too_short, [short, scored("bf16-mixed", 300)]),
    ):
        assert list(choice_lines(Comparison(results, ACCURACY), ["a.py"])) == [f"Keep the script unchanged: {reason}."]


def test_the_table_fits_the_terminal() -> None:
    whole, narrow = terminal_table(compared(), None), terminal_table(compared(), 80)
    assert whole[0].split() == (
        ["rung", "with", "steps", "to", "step", "20", "to", "the", "end", "samples/s", "speed-up", "memory", "test_acc"]
    )
    assert "bf16-mixed, compile, 2 devices" in whole[2]
    assert whole[3].split() == ["fsdp", "2", "devices", "-", "-", "-", "failed", "-", "-", "-"]
    assert all(len(line) <= 80 for line in narrow)
    assert "speed-up" in narrow[0]
    assert "test_acc" in narrow[0]


def test_the_files_have_the_same_table(tmp_path: Path) -> None:
    comparison = compared()
    sentences = [*choice_lines(comparison, ["train.py"]), *notes(comparison, "cpu")]
    paths = write_files(tmp_path, "The ladder of train.py", comparison, sentences)
    assert [path.name for path in paths] == ["ladder.json", "ladder.md", "ladder.html"]
    rows = json.loads((tmp_path / "ladder.json").read_text())
    assert [each["state"] for each in rows] == ["finished", "finished", "failed", *["skipped"] * 3]
    assert rows[1]["record"]["samples_per_second"] == 185
    assert rows[2]["reason"] == "exit code 1: ValueError: it does not fit."
    written = (tmp_path / "ladder.md").read_text()
    assert markdown_table(comparison)[1] in written
    assert "```python\ntw.Trainer(devices=2" in written
    page = Page((tmp_path / "ladder.html").read_text())
    assert not page.open
    assert not page.attributes & LOADING
    assert "185 (1.85x)" in page.text
    assert [row[0] for row in page.cells] == [
        "rung", "unchanged", "ddp", "fsdp", "deepspeed_stage_2", "ddp_sharded", "deepspeed_stage_3",
    ]  # fmt: skip


HEAD = "Traceback (most recent call last):\n  File"
FAILED_FIRST = "trainwright: rank 1 of 2 failed first ({}); the job was ended.\n"
OUTPUTS = {
    f"{HEAD}\n    f()\n    ~^^\nmy.errors.Broken: no weights\nsee the log\n": (1, "my.errors.Broken: no weights"),
    f"[rank1] {HEAD}\n[rank1] KeyError: 'x'\n{FAILED_FIRST.format('OSError: y')}": (1, "OSError: y"),
    f"{HEAD}\nMemoryError\n{FAILED_FIRST.format('exit code 1')}": (1, "MemoryError"),
    "  File\n    x y\nSyntaxError: invalid syntax\n": (1, "SyntaxError: invalid syntax"),
    "usage: a.py\na.py: error: unrecognized arguments: --lr\n": (2, "a.py: error: unrecognized arguments: --lr"),
    "epoch 1\repoch 2\r": (-9, "killed by SIGKILL, on Linux often by the out-of-memory killer"),
    "": (3, "it printed nothing"),
    "the accuracy is too low\n-----\n": (3, "the accuracy is too low"),
    f"{HEAD}\nOSError: x\nException ignored in: <function A.__del__>\n{HEAD}\nTypeError: y\n": (1, "OSError: x"),
    f"no data\nException ignored in atexit callback: <function late>\n{HEAD}\nTypeError: y\n": (1, "no data"),
    "Exception ignored in: <stdout>\nBrokenPipeError: the pipe\n": (120, "BrokenPipeError: the pipe"),
    f"{HEAD}\nOSError: handled\nepoch 2\n": (-9, "killed by SIGKILL, on Linux often by the out-of-memory killer"),
    f"{HEAD}\nOSError: x\nat exit\n": (-6, "OSError: x"),
    f"  + Exception Group {HEAD}\n  | ExceptionGroup: two\n    | KeyError: 'x'\n    +----\n": (1, "| KeyError: 'x'"),
    f"{HEAD}\nKeyError: Caught KeyError in worker 0.\nOriginal {HEAD}\n    x()\nKeyError: 'row'\n": (
        1,
        "KeyError: 'row'",
    ),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_reason_is_one_line_of_the_output(output: str) -> None:
    code, reason = OUTPUTS[output]
    assert reason_of(output, code) == reason


def test_ranks_are_read_together(tmp_path: Path) -> None:
    plain: dict[str, Any] = {**vars(record()), "points": [[1, 0.5], [4, 2.0]]}
    for rank, (rate, peak) in enumerate([(100.0, 5), (80.0, 7)]):
        ranks = {**plain, "samples_per_second": rate, "peak_bytes": peak}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(ranks))
    read = RungRecord.read(tmp_path)
    assert read is not None
    assert (read.samples_per_second, read.batches_per_second, read.peak_bytes) == (180.0, 20.0, 7)
    assert read.seconds_to(2) == pytest.approx(1.0)
    assert read.seconds_to(20) == read.seconds
