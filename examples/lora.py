"""Adapt a language model with LoRA (package peft): the model stays as it is, and a few new weights change what it writes.

    python examples/lora.py
    python examples/lora.py --pretrained distilgpt2

By default a small GPT-2, made from its config, first learns to write the alphabet from any letter onward; its adapter then
learns to write it backward. With `--pretrained` a model of the Hugging Face Hub learns to write sonnets.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import trainwright as tw

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
except ImportError as error:
    raise ImportError("examples/lora.py needs peft and transformers: pip install peft transformers") from error

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SONNETS = Path(__file__).parent / "data" / "sonnets.txt"


class Writer(tw.Module):
    def __init__(self, model, lr: float):
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=self.lr)


def train(model, rows, steps: int, lr: float):
    """Train what is not frozen, and print how large the checkpoint is."""
    checkpoint = tw.ModelCheckpoint(trained_only=True)
    trainer = tw.Trainer(max_steps=steps, callbacks=[checkpoint], log_every_n_steps=10, default_root_dir="runs")
    trainer.fit(Writer(model.train(), lr), DataLoader(rows, 13, shuffle=True))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    size = sum(file.stat().st_size for file in Path(checkpoint.best_model_path).glob("model*.safetensors"))
    trainer.print(f"trained {trained:,} of {sum(each.numel() for each in model.parameters()):,} weights", end="")
    trainer.print(f", {size / 1024:.0f} KiB in the checkpoint")


def make_rows(direction: int):
    """Return 12 letters from each letter onward (1) or backward (-1), ten times; after z comes a."""
    return (torch.arange(26)[:, None] + direction * torch.arange(12)).remainder(26).repeat(10, 1)


def make_model():
    """Return a small GPT-2 that writes the alphabet, and what turns its tokens into text."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16}
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=26, bos_token_id=0, eos_token_id=None, **sizes))
    train(model, make_rows(1), steps=150, lr=3e-3)
    return model, lambda tokens: "".join(LETTERS[each] for each in tokens)


def main():
    parser = argparse.ArgumentParser(description="Adapt a language model with LoRA.")
    parser.add_argument("--pretrained", metavar="NAME", help="a GPT-2 of the Hub, such as distilgpt2")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    tw.seed_everything(0)
    if options.pretrained:
        tokenizer = AutoTokenizer.from_pretrained(options.pretrained)
        base, decode = AutoModelForCausalLM.from_pretrained(options.pretrained), tokenizer.decode
        tokens = tokenizer(SONNETS.read_text().partition("\n\n")[2], return_tensors="pt").input_ids[0]
        rows, start, count = tokens.unfold(0, 64, 32), tokens[None, :4], 60
    else:
        base, decode = make_model()
        rows, start, count = make_rows(-1), torch.tensor([[LETTERS.index("m")]]), 11
    targets = ["c_attn", "c_proj", "c_fc"]
    model = get_peft_model(base, LoraConfig(r=8, target_modules=targets, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    train(model, rows, options.steps, lr=1e-2 if options.pretrained is None else 5e-4)

    model.eval()
    writing = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(start)}
    with model.disable_adapter():
        print(f"without the adapter: {decode(model.generate(start, **writing)[0])}")
    print(f"with the adapter: {decode(model.generate(start, **writing)[0])}")


if __name__ == "__main__":
    main()
