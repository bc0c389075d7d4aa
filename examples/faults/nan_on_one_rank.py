"""Train on two processes with one sample that is NaN, and find the rank, the batch and the sample.

python examples/faults/nan_on_one_rank.py
"""

import math
import re
import sys

from safetensors.torch import load_file
from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples, start
from torch.utils.data import DataLoader

import trainwright as tw

BAD = 131


def train():
    tw.seed_everything(0)
    data = samples(320)
    data.tensors[0][BAD, 5] = math.nan
    saves = tw.ModelCheckpoint(FOLDER / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    policy = {"nan_policy": "raise", "callbacks": saves, "default_root_dir": FOLDER}
    trainer = tw.Trainer(devices=2, max_epochs=1, **policy, **SETTINGS)
    trainer.fit(Classifier(), DataLoader(data, batch_size=8, shuffle=True))


def main():
    empty_folder()
    run = start("train")
    print(f'two processes, sample {BAD} is NaN, nan_policy="raise": exit code {run.returncode}')
    errors = set(re.findall(r"FloatingPointError: (the loss of .*? is in the batch\.)", run.stderr))
    print(*errors, sep="\n")
    stored = list(FOLDER.rglob("bad-batch-*.safetensors"))
    batch = load_file(stored[0])  # input, label, number of the sample, as the loader has yielded them
    found = batch["2"][batch["0"].isnan().any(1)].tolist()
    print(f"{stored[0].name} has NaN in sample {found}")
    saved = list(FOLDER.glob("checkpoints/*.ckpt"))
    weights = [Classifier.load_from_checkpoint(path).state_dict() for path in saved]
    are_finite = all(bool(tensor.isfinite().all()) for each in weights for tensor in each.values())
    print(f"{len(saved)} checkpoints, {'all' if are_finite else 'not all'} with finite weights")
    is_named = len(errors) == 1 and "rank 1" in str(errors)
    is_kept = run.returncode == 1 and is_named and found == [BAD] and len(saved) == 5 and are_finite
    end(is_kept, "a NaN on one rank ends all by one error that names the batch, and no broken weights are saved")


if __name__ == "__main__":
    train() if sys.argv[1:] else main()
