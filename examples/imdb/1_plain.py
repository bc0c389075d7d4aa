"""A DistilBERT that classifies film reviews as good or bad, trained in a plain PyTorch loop.

python examples/imdb/1_plain.py
"""

import time

import reviews
import torch
from tqdm import tqdm


def evaluate(model, loader, device):
    """Return the share of the reviews that the model classifies correctly."""
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for batch in loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            predicted = model(**batch).logits.argmax(dim=1)
            correct += (predicted == batch["labels"]).sum().item()
            total += len(predicted)
    return correct / total


def main():
    options = reviews.parse_options()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader, test_loader = reviews.load(options)
    model = reviews.make_model(options).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)

    start = time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        for batch in tqdm(train_loader, desc=f"epoch {epoch}"):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: val_acc {evaluate(model, val_loader, device):.4f}")
    seconds = time.perf_counter() - start

    print(f"test accuracy: {100 * evaluate(model, test_loader, device):.2f} %")
    print(f"training time: {seconds:.1f} s")


if __name__ == "__main__":
    main()
