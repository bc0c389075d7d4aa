"""A graph network (GCN) guesses how a karate club split into two, from the friendships and from one known member a side.

    python examples/graph.py

Zachary's club has 34 members and 78 friendships. Networkx, which torch brings, has the graph. The picture is written to runs/.
"""

import argparse

import networkx
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw

KNOWN = [0, 33]  # the instructor, and the president


def load_club():
    """Return the graph, its normalized adjacency matrix, and the side of every member: 0 is the instructor's."""
    graph = networkx.karate_club_graph()
    adjacency = torch.eye(len(graph))
    for one, other in graph.edges:
        adjacency[one, other] = adjacency[other, one] = 1
    scale = adjacency.sum(dim=1).rsqrt()
    sides = torch.tensor([int(graph.nodes[member]["club"] == "Officer") for member in graph])
    return graph, scale[:, None] * adjacency * scale, sides


class GCN(tw.Module):
    """Two layers; in each, a member gets the mean of its friends' features, and a linear map of it."""

    def __init__(self, members: int, width: int = 16):
        super().__init__()
        self.first, self.second = nn.Linear(members, width), nn.Linear(width, 2)

    def forward(self, adjacency):
        features = torch.relu(adjacency @ self.first.weight.T + self.first.bias)  # a member's feature is its number
        return self.second(adjacency @ features)

    def training_step(self, batch, batch_idx):
        adjacency, sides = batch
        loss = nn.functional.cross_entropy(self(adjacency)[KNOWN], sides[KNOWN])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        adjacency, sides = batch
        is_right = (self(adjacency).argmax(1) == sides).float()
        self.log("val_acc", (is_right.sum() - is_right[KNOWN].sum()) / (len(sides) - len(KNOWN)), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(1)[:, 1]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)


def main():
    parser = argparse.ArgumentParser(description="Train a GCN on Zachary's karate club.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    tw.seed_everything(0)
    graph, adjacency, sides = load_club()
    whole = DataLoader([(adjacency, sides)], batch_size=None)
    steps = DataLoader([(adjacency, sides)] * 20, batch_size=None)  # every batch is the whole graph
    trainer = tw.Trainer(max_epochs=options.epochs, devices=1, log_every_n_steps=1, default_root_dir="runs")
    trainer.fit(gcn := GCN(len(graph)), steps, whole)
    val_acc = trainer.callback_metrics["val_acc"]
    officers = trainer.predict(gcn, whole)[0].cpu()
    wrong = [member + 1 for member in graph if (officers[member] > 0.5) != sides[member]]

    figure = Figure(figsize=(7, 5), layout="constrained")
    panel = figure.subplots()
    borders = ["tab:red" if member + 1 in wrong else "white" for member in graph]
    colors = {"node_color": officers.tolist(), "cmap": "coolwarm", "vmin": 0, "vmax": 1, "edgecolors": borders}
    places = networkx.spring_layout(graph, seed=2)
    networkx.draw(graph, places, panel, **colors, edge_color="silver", labels={each: each + 1 for each in graph})
    figure.savefig(f"{trainer.log_dir}/club.png", dpi=80)
    print(f"members on the wrong side: {', '.join(map(str, wrong)) or 'none'}")
    print(f"val_acc: {val_acc:.4f}")
    print(f"picture: {trainer.log_dir}/club.png")


if __name__ == "__main__":
    main()
