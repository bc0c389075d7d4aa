"""A notebook in a real kernel: fits on two processes, one strategy after another, and an error in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from started import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.launch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CELLS = [
    f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]",
    """
import torch
import trainwright as tw
from small import loss_of, make_loader, make_net

class Net(tw.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.net, self.fails = make_net(), fails
    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ValueError("labels are out of range")
        return loss_of(self.net, batch)
    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Notes(tw.Callback):
    def __init__(self):
        self.accuracies = []
    def on_validation_epoch_end(self, trainer, module):
        self.accuracies.append(float(trainer.callback_metrics["accuracy"]))

def trainer_of(strategy, **options):
    return tw.Trainer(devices=2, accelerator="cpu", strategy=strategy, max_epochs=2, num_sanity_val_steps=0,
                      enable_model_summary=False, logger=False, enable_checkpointing=False, **options)
""",
    """
notes, module = Notes(), Net()
before = module.net[0].weight.clone()
trainer_of("ddp_sharded", callbacks=[notes]).fit(module, make_loader(24, 2), make_loader(20, 5))
""",
    """
batch = next(iter(make_loader(20, 20)))
accuracy = float((module.net(batch[0]).argmax(1) == batch[1]).float().mean())
print("notes", len(notes.accuracies), "trained", not torch.equal(before, module.net[0].weight), 0 <= accuracy <= 1)
""",
    """
other = Net()
trainer_of("deepspeed", enable_progress_bar=False).fit(other, make_loader(24, 2), make_loader(20, 5))
print("alike", torch.allclose(module.net[0].weight, other.net[0].weight, atol=1e-5))
""",
    """
held = Net()
held.fh = open("held.txt", "w")
try:
    trainer_of("ddp").fit(held, make_loader(24, 2))
except TypeError as error:
    print("refused:", error)
""",
    'trainer_of("ddp", enable_progress_bar=False).fit(Net(fails=True), make_loader(24, 2))',
]


def test_cells_are_trained_in_new_processes(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each.strip()) for each in CELLS])
    from notebook_client import run_notebook

    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        run_notebook(notebook, tmp_path)
    assert "WorkerFailed" in str(caught.value)
    assert "labels are out of range" in str(caught.value)
    assert 'raise ValueError("labels are out of range")' in str(caught.value)  # the line of the cell
    printed = ["".join(each.get("text", "") for each in cell.get("outputs", [])) for cell in notebook.cells]
    assert "notes 2 trained True True" in printed[3]
    assert "alike True" in printed[4]
    assert "refused: " in printed[5]
    assert ".fh " in printed[5]
