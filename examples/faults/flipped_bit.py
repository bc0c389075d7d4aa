"""Flip one bit of the newest checkpoint, try to load it, and resume from the one before.

python examples/faults/flipped_bit.py
"""

import subprocess
import sys
import warnings
from pathlib import Path

from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples
from torch.utils.data import DataLoader

import trainwright as tw


def train(folder: Path, epochs: int, ckpt_path: str | None = None) -> list[str]:
    """Train up to a number of epochs, store the weights, and return the warnings."""
    tw.seed_everything(0)
    module, loader = Classifier(), DataLoader(samples(320), batch_size=8, shuffle=True)
    saves = tw.ModelCheckpoint(folder / "checkpoints", save_top_k=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = tw.Trainer(max_epochs=epochs, callbacks=saves, default_root_dir=folder, **SETTINGS)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    if epochs == 3:
        module.export(folder / "weights.safetensors")
    return [str(warning.message) for warning in caught]


def main():
    empty_folder()
    train(FOLDER / "whole", epochs=3)
    train(FOLDER / "cut", epochs=2)
    newest = max((FOLDER / "cut/checkpoints").glob("*.ckpt"), key=lambda path: path.name)
    file = next(newest.glob("model*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 0b00010000  # within the data of a tensor
    file.write_bytes(content)
    print(f"one bit flipped in {file}")

    command = [sys.executable, "-m", "trainwright", "checkpoint", "verify", str(newest)]
    verified = subprocess.run(command, capture_output=True, text=True)
    print(f"exit code of trainwright checkpoint verify: {verified.returncode}")
    try:
        Classifier.load_from_checkpoint(newest)
        error = ""
    except tw.CheckpointError as problem:
        error = str(problem)
    print(f"load_from_checkpoint: {error or 'no error'}")
    said = train(FOLDER / "cut", epochs=3, ckpt_path="auto")
    print(*said, sep="\n")
    ends = [(FOLDER / name / "weights.safetensors").read_bytes() for name in ("whole", "cut")]
    is_kept = verified.returncode == 77 and file.name in error and ends[0] == ends[1]
    end(
        is_kept, "the damaged file is named, and the run resumes from the checkpoint before and ends with the same bits"
    )


if __name__ == "__main__":
    main()
