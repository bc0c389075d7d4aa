"""Loaders that give no batch, which only reading shows of those without a length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from small import QUIET, Classifier, Stream, make_loader
from torch.utils.data import DataLoader

import trainwright as tw


def run(call: str, loaders: Any, module: tw.Module | None = None, **settings: Any) -> Any:
    trainer = tw.Trainer(**{"max_epochs": 1, "devices": "auto", **QUIET, **settings})
    module = Classifier() if module is None else module
    if call == "fit":
        trainer.fit(module, make_loader(16), loaders)
        return trainer.global_step
    return getattr(trainer, call)(module, loaders)


def stream(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(samples), batch_size=4, **options)


@pytest.mark.parametrize(
    ("call", "stage"), [("fit", "validation"), ("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_a_stream_that_yields_nothing_is_refused(call: str, stage: str) -> None:
    match = (
        rf"the {stage} loader yielded no batches \(its dataset yields nothing, drop_last.*Give it data, or leave it out"
    )
    for loader in (stream(0), stream(3, drop_last=True)):
        with pytest.raises(RuntimeError, match=match):
            run(call, loader, num_sanity_val_steps=2)
    limit = {"fit": "val", "validate": "val"}.get(call, call)
    with pytest.raises(RuntimeError, match=match):
        run(call, stream(0), num_sanity_val_steps=0, **{f"limit_{limit}_batches": 1})
    with pytest.raises(RuntimeError, match=f"the {stage} loader 'b' yielded no batches"):
        run(call, {"a": stream(8), "b": stream(0)})
    run(call, {"a": stream(8), "b": stream(1)})
    run(call, {"a": stream(8), "b": stream(0)}, **{f"limit_{limit}_batches": 0})


def test_a_hook_may_return_an_empty_one() -> None:
    class Empty(Classifier):
        def val_dataloader(self) -> Any:
            return stream(0)

        test_dataloader = predict_dataloader = val_dataloader

    assert run("fit", None, Empty()) == 4
    for call in ("validate", "test"):
        assert run(call, None, Empty()) == [{}]
    assert run("predict", None, Empty()) == []


def two_ranks(folder: Path) -> list[str]:
    """Return the errors of the evaluations on this rank."""
    rank, raised = int(tw.Trainer(devices="auto", **QUIET).global_rank), []
    shared = [stream(0), stream(1), stream(3, drop_last=True)]
    # The ranks have separate loaders; only the second kind knows its length
    own = [
        (stream(0), stream(0)),
        (stream(8), stream(0)),
        (make_loader(0), make_loader(0)),
        (make_loader(8), make_loader(0)),
    ]
    cases: list[tuple[Any, dict[str, Any]]] = [(each, {}) for each in shared]
    cases += [(pair[rank], {"use_distributed_sampler": False}) for pair in own]
    for call in ("fit", "test", "predict"):
        for loader, settings in cases:
            try:
                run(call, loader, **settings)
                raised.append("")
            except RuntimeError as error:
                raised.append(str(error).partition(" (")[0])
    return raised


def test_ranks_agree_on_empty_loaders(tmp_path: Path) -> None:
    """If the ranks have separate loaders and only one has batches, nothing is rejected."""
    expected = []
    for stage in ("validation", "test", "predict"):
        refused = f"the {stage} loader yielded no batches"
        expected += [refused, "", refused, refused, "", refused, ""]
    assert run_job(two_ranks, 2, tmp_path) == [expected, expected]
