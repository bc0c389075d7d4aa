"""Graphs of torch_geometric: its DataLoader, and predictions in order."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET
from torch import Tensor, nn

import trainwright as tw

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it scripts functions when it is imported
    geometric = pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`torch.jit")]
GRAPHS = 61


def graphs(size: int = GRAPHS) -> list[Any]:
    """Rings of several sizes. The label is the sign of their features' mean."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(size):
        nodes = 3 + number % 4
        label = number % 2
        edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        features = torch.randn(nodes, 4, generator=generator) + (1.5 if label else -1.5)
        made.append(Data(x=features, edge_index=edges, y=torch.tensor([label]), number=number))
    return made


class GraphClassifier(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.convolution, self.head = GCNConv(4, 8), nn.Linear(8, 2)

    def forward(self, data: Any) -> Tensor:
        x = self.convolution(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch), batch.y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self(batch).argmax(-1) == batch.y).float().mean(), batch_size=len(batch.y))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self(batch), "number": torch.as_tensor(batch.number)}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def programs(folder: Path) -> dict[str, Any]:
    options = {**QUIET, "devices": "auto"}
    module = GraphClassifier()
    trainer = tw.Trainer(max_epochs=4, **options)
    trainer.fit(module, DataLoader(graphs(), batch_size=8, shuffle=True), DataLoader(graphs(), batch_size=8))
    found: dict[str, Any] = {"accuracy": float(trainer.callback_metrics["accuracy"])}
    predicted = trainer.predict(module, DataLoader(graphs(), batch_size=8))
    found["numbers"] = torch.cat([each["number"] for each in predicted]).tolist()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_are_trained(ranks: int, tmp_path: Path) -> None:
    results = [programs(tmp_path)] if ranks == 1 else run_job(programs, ranks, tmp_path)
    for found in results:
        assert found["accuracy"] > 0.95
        assert found["numbers"] == list(range(GRAPHS))
