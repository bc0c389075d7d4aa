"""Train a BERT under strategies that shard it over the processes, and show what each process holds.

    python examples/sharded_bert.py
    python examples/sharded_bert.py --strategies fsdp --pretrained bert-base-uncased --batch-size 8

The film reviews are those of examples/imdb: made, or the published ones (--data). The BERT is small and made from a config, or
a pretrained one. Under each strategy the same Module trains in two processes; its best checkpoint is then loaded as a plain
module and tested under ddp. The metrics, the checkpoints and a picture are written to runs/sharded_bert.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torchmetrics
from transformers import AutoModelForSequenceClassification, BertConfig
from transformers.models.bert.modeling_bert import BertLayer

import trainwright as tw

sys.path.append(str(Path(__file__).parent / "imdb"))
import archive
import reviews

STRATEGIES = ("ddp", "ddp_sharded", "deepspeed_stage_1", "deepspeed_stage_2", "fsdp", "deepspeed_stage_3")


def make_strategy(name):
    """Return what to pass as strategy=; the two that shard parameters are told to do so with those of a small model too."""
    if name == "fsdp":  # otherwise the layers that are gathered one by one have at least a million parameters
        return tw.FSDPStrategy(auto_wrap_policy={BertLayer})
    if name == "deepspeed_stage_3":  # otherwise parameters of up to 100,000 elements stay whole
        return tw.DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=1000)
    return name


class ReviewClassifier(tw.Module):
    def __init__(self, vocabulary=1000, width=64, layers=2, learning_rate=1e-3, pretrained=None):
        super().__init__()
        self.save_hyperparameters()
        if pretrained:
            self.bert = reviews.load_pretrained(AutoModelForSequenceClassification, pretrained, num_labels=2).train()
        else:
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
            config = BertConfig(vocab_size=vocabulary, num_attention_heads=4, num_labels=2, **sizes)
            self.bert = AutoModelForSequenceClassification.from_config(config).train()
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def training_step(self, batch, batch_idx):
        loss = self.bert(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_acc.update(self.bert(**batch).logits, batch["labels"])
        self.log("val_acc", self.val_acc)

    def test_step(self, batch, batch_idx):
        self.test_acc.update(self.bert(**batch).logits, batch["labels"])
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


class Memory(tw.Callback):
    """Notes how many bytes of the parameters and of the optimizer's state are in this process, once it has trained."""

    def on_train_end(self, trainer, module):
        state = [value for entry in trainer.optimizers[0].state.values() for value in entry.values()]
        self.parameters = sum(here(each).nbytes for each in module.parameters())
        self.optimizer = sum(here(each).nbytes for each in state if isinstance(each, torch.Tensor))


def here(tensor):
    """Return the part of a tensor that is in this process."""
    tensor = getattr(tensor, "ds_tensor", tensor)  # stage 3's shard of a parameter
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # fsdp's


def train(name, options):
    """Train under a strategy, and return its row of the table. Collective: call on every rank."""
    tw.seed_everything(options.seed)
    memory, best = Memory(), tw.ModelCheckpoint(monitor="val_acc", mode="max")
    settings = {"devices": options.devices, "default_root_dir": options.folder, "enable_progress_bar": False}
    trainer = tw.Trainer(
        max_epochs=options.epochs,
        strategy=make_strategy(name),
        callbacks=[memory, best],
        enable_model_summary=False,
        **settings,
    )
    with trainer.engine.rank_zero_first():  # which downloads, if need be, while the others wait
        train_loader, val_loader, test_loader = reviews.load(options)
    vocabulary = reviews.vocabulary_size(options)
    module = ReviewClassifier(vocabulary, learning_rate=options.learning_rate, pretrained=options.pretrained)
    start = time.perf_counter()
    trainer.fit(module, train_loader, val_loader)
    seconds = time.perf_counter() - start

    # A checkpoint is whole, whatever strategy wrote it.
    loaded = ReviewClassifier.load_from_checkpoint(best.best_model_path)
    plain = tw.Trainer(strategy="ddp", logger=False, **settings)
    (result,) = plain.test(loaded, test_loader, verbose=False)
    return name, memory.parameters, memory.optimizer, result["test_acc"], seconds


def table(rows):
    lines = [f"{'strategy':18s} {'parameters':>11s} {'optimizer':>11s} {'test accuracy':>14s} {'seconds':>8s}"]
    for name, parameters, optimizer, accuracy, seconds in rows:
        sizes = f"{parameters / 2**20:7.2f} MiB {optimizer / 2**20:7.2f} MiB"
        lines.append(f"{name:18s} {sizes} {100 * accuracy:12.2f} % {seconds:8.1f}")
    return "\n".join(lines)


def draw(rows, path):
    from matplotlib.figure import Figure

    names = [f"{row[0]}\n{100 * row[3]:.1f} % correct" for row in rows]
    parameters, optimizer = ([row[index] / 2**20 for row in rows] for index in (1, 2))
    figure = Figure(figsize=(8, 1 + 0.6 * len(rows)), layout="constrained")
    panel = figure.subplots()
    panel.barh(names, parameters, color="tab:blue", label="parameters")
    panel.barh(names, optimizer, left=parameters, color="tab:green", label="optimizer state")
    panel.invert_yaxis()
    panel.set(title="What one of the processes holds between two steps", xlabel="MiB")
    panel.grid(axis="x", alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description="Train a BERT under strategies that shard it, and compare.")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="reviews in a batch of each process")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--pretrained", metavar="NAME", help="weights from the Hub, such as bert-base-uncased")
    parser.add_argument(
        "--data", default="made", help="made, hub, or the path or URL of aclImdb_v1.tar.gz or its folder"
    )
    parser.add_argument("--digest", default=archive.PUBLISHED_MD5, help="the archive's MD5 or SHA-256")
    parser.add_argument("--reviews", type=int, default=1500, help="how many reviews to make")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/sharded_bert"), help="for what it writes")
    options = parser.parse_args()
    options.cache = options.folder / "data"
    names = options.strategies.split(",")
    if unknown := [name for name in names if name not in STRATEGIES]:
        parser.error(f"--strategies {unknown[0]}: choose from {', '.join(STRATEGIES)}")

    rows = [train(name, options) for name in names]
    if tw.rank_zero_only.rank == 0:
        print(table(rows))
        draw(rows, options.folder / "memory.png")
        print(f"picture: {options.folder / 'memory.png'}")


if __name__ == "__main__":
    main()
