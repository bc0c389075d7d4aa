"""Train a small GPT on Shakespeare's sonnets, letter by letter, and print what it writes while it learns.

    python examples/gpt.py
    python examples/gpt.py --text https://www.gutenberg.org/cache/epub/100/pg100.txt --steps 5000

By default the text is data/sonnets.txt: 32 sonnets, in the public domain. `--text` takes any other file or URL.
"""

import argparse
import csv
import urllib.request
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


class GPT(tw.Module):
    def __init__(
        self, alphabet: str, prompt: str, context: int = 64, width: int = 96, layers: int = 2, lr: float = 4e-3
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(len(alphabet), width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(alphabet))

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.blocks(self.embedding(tokens) + self.position[:length], mask=mask, is_causal=True))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()))

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics["val_loss"]
        self.print(f"\n--- after {self.trainer.global_step} steps, val_loss {loss:.3f}:\n{self.write(150)}\n")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def write(self, count: int):
        """Return the prompt and that many letters after it."""
        text = self.hparams.prompt
        with tw.isolate_rng():  # so that a sample changes nothing about the training
            for _ in range(count):
                known = [self.hparams.alphabet.index(letter) for letter in text[-self.hparams.context :]]
                logits = self(torch.tensor([known], device=self.device))[0, -1]
                text += self.hparams.alphabet[torch.multinomial((logits / 0.7).softmax(0), 1).item()]
        return text


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT on a text.")
    parser.add_argument("--text", default=str(Path(__file__).parent / "data" / "sonnets.txt"), help="a file or a URL")
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()

    tw.seed_everything(0)
    source = options.text if "://" in options.text else Path(options.text).resolve().as_uri()
    with urllib.request.urlopen(source) as file:
        lines = file.read().decode().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).strip()
    alphabet = "".join(sorted(set(text)))
    tokens = torch.tensor([alphabet.index(letter) for letter in text])
    gpt = GPT(alphabet, prompt="Shall I" if set("Shall I") <= set(text) else text[:10])
    windows = tokens.unfold(0, gpt.hparams.context + 1, 8)  # the targets are the inputs moved by a letter
    cut = len(windows) * 9 // 10  # validation begins 8 windows further, where none has a letter of the training
    train_set, val_set = (TensorDataset(part[:, :-1], part[:, 1:]) for part in (windows[:cut], windows[cut + 8 :]))

    speed = tw.ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel())
    trainer = tw.Trainer(max_steps=options.steps, gradient_clip_val=1.0, callbacks=[speed], default_root_dir="runs")
    trainer.fit(gpt, DataLoader(train_set, 16, shuffle=True, drop_last=True), DataLoader(val_set, 64))
    if trainer.is_global_zero:
        with open(f"{trainer.log_dir}/metrics.csv", newline="") as file:
            rates = [rate for row in csv.DictReader(file) if (rate := row.get("train/items_per_sec"))]
        print(f"tokens/s: {float(rates[-1]):,.0f}" if rates else "tokens/s: too few steps to say")
        print(f"val_loss: {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
