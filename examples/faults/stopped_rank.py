"""One of two processes does not return from a step: see which rank is late and where, and when the job ends.

python examples/faults/stopped_rank.py
"""

import os
import re
import sys
import time
from pathlib import Path

from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples, start
from torch.utils.data import DataLoader

import trainwright as tw

HANG_TIMEOUT = 20  # seconds; half an hour by default


class Stuck(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and self.trainer.global_rank == 1:
            self.read_from_a_silent_server()
        return super().training_step(batch, batch_idx)

    def read_from_a_silent_server(self):
        (FOLDER / "process").write_text(str(os.getpid()))
        time.sleep(3600)


def train():
    trainer = tw.Trainer(devices=2, max_epochs=1, hang_timeout=HANG_TIMEOUT, default_root_dir=FOLDER, **SETTINGS)
    trainer.fit(Stuck(), DataLoader(samples(320), batch_size=8))


def main():
    empty_folder()
    run = start("train")
    process = FOLDER / "process"
    seconds = time.time() - process.stat().st_mtime
    print(f"rank 1 sleeps in a step, hang_timeout={HANG_TIMEOUT}: exit code {run.returncode} {seconds:.0f} s later")
    [report] = re.findall("Hang for .*", run.stderr)[:1] or ["no report"]
    print(report)
    stacks = "".join(path.read_text() for path in FOLDER.rglob("hang-*.txt"))
    of_rank = stacks.partition("== rank 1")[2]
    [frame] = re.findall(r'File ".*/(stopped_rank.py", line \d+ in read_\w+)', of_rank)[:1] or ["no frame"]
    print(f'the file with the stacks of both ranks has, of rank 1: "{frame}')
    is_gone = not Path("/proc", process.read_text()).exists()
    print(f"the process of rank 1 {'is gone' if is_gone else 'is still there'}")
    is_named = "rank 1 never came: at" in report and "read_from_a_silent_server" in report and "line" in frame
    end(
        run.returncode == 1 and is_named and is_gone,
        "a rank that does not return is named with its line, and hang_timeout ends the job",
    )


if __name__ == "__main__":
    train() if sys.argv[1:] else main()
