"""The plain loop of 1_plain.py with an Accelerator: for any number of processes, any strategy and any precision.

python examples/imdb/9_raw_loop.py
trainwright launch --devices 2 --strategy ddp examples/imdb/9_raw_loop.py
"""

import time

import reviews
import torch
from tqdm import tqdm

import trainwright as tw


def evaluate(model, loader, accelerator):
    """Return the share of the reviews that the model classifies correctly."""
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for batch in loader:
            predicted = model(**batch).logits.argmax(dim=1)
            correct += (predicted == batch["labels"]).sum().item()
            total += len(predicted)
    correct, total = accelerator.reduce([correct, total])
    return correct / total


def main():
    options = reviews.parse_options()
    tw.set_seed(options.seed)
    accelerator = tw.Accelerator()
    with accelerator.main_process_first():  # which downloads, if need be, while the others wait
        train_loader, val_loader, test_loader = reviews.load(options)
    model = reviews.make_model(options)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    model, optimizer, train_loader, val_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader, test_loader
    )

    start = time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        for batch in tqdm(train_loader, desc=f"epoch {epoch}", disable=not accelerator.is_main_process):
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: val_acc {evaluate(model, val_loader, accelerator):.4f}")
    seconds = time.perf_counter() - start

    accelerator.print(f"test accuracy: {100 * evaluate(model, test_loader, accelerator):.2f} %")
    accelerator.print(f"training time: {seconds:.1f} s")


if __name__ == "__main__":
    main()
