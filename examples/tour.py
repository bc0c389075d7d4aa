"""Run the examples at a small size, one after another, and print how long each took and what came out.

    python examples/tour.py [gan.py imdb/]    # what is installed here, or those whose names begin so; the others are skipped

What each prints is kept in runs/tour/. If one fails, the others still run, and the exit code is 1.
"""

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

FOLDER, LOGS, PIP_NAMES = Path(__file__).parent, Path("runs/tour"), {"sklearn": "scikit-learn"}
IN_A_KERNEL = """
import nbclient, nbformat, sys
for cell in nbclient.execute(nbformat.read(sys.argv[1], 4)).cells:
    print(*(each.get("text", "") for each in cell.get("outputs", [])), sep="")
"""


class Example(NamedTuple):
    name: str
    arguments: str
    result: str  # a pattern: what its group matches last in the output is shown
    needs: str = ""  # modules that Trainwright does not bring


REVIEWS, ORIGINALS = sorted(FOLDER.glob("imdb/[0-9]*.py")), sorted(FOLDER.glob("first/*.py"))
DIGITS = ["digits.py", "four_tricks.py", "raw_loop.py"]
ENGINES = {"6_deepspeed": "deepspeed", "8_ddp_sharded": "fairscale"}
IMDB, BERT, KERNEL = "--reviews 2400 --epochs 1", "transformers tokenizers", "matplotlib nbclient nbformat ipykernel"
LOOP_RESULT, SCORE = r"(?:epoch \d+: )?(\D*(?:val_acc|distance).*)", r"((?:test.acc\w*|accuracy|val_acc|val_loss): .*)"
GALLERY = {"first.py": "sklearn", "text.py": "", "graph.py": "matplotlib", "stream.py": "datasets"}
STORY, NOTEBOOKS, ENDS = FOLDER / "faults/story.py", ["first", "gpt", "graph", "raw_loop/notebook"], ["py", "ipynb"]
GALLERY = {"first.py": "sklearn", "text.py": "", "graph.py": "matplotlib", "stream.py": "datasets"}
EXAMPLES = [
    *(Example(name, "", SCORE, needs) for name, needs in GALLERY.items()),
    *(Example(f"first/{path.name}", "", SCORE, f"sklearn {path.stem.partition('_')[2]}") for path in ORIGINALS),
    *(Example(name, "--epochs 5", SCORE, "sklearn matplotlib") for name in DIGITS),
    Example("sweep.py", "--epochs 2", "(best learning rate: .*)", "sklearn"),
    Example("images.py", "", "(with augmentation: .*)", "matplotlib"),
    Example("gpt.py", "--steps 400", SCORE),
    Example("lora.py", "", "(with the adapter: .*)", "peft transformers"),
    Example("gan.py", "--epochs 4", "(distance: .*)"),
    Example("interruption.py", "", "(losses that differ: .*)"),
    *(Example(f"multi_gpu_demo.{end}", "", "(.*eep.peed.*%)", f"deepspeed sklearn {KERNEL}") for end in ENDS),
    Example("sharded_bert.py", "", "(.*fsdp.*)", f"{BERT} deepspeed fairscale matplotlib"),
    *(Example(f"faults/{path.name}", "", "ok: (.*)") for path in sorted({*FOLDER.glob("faults/*.py")} - {STORY})),
    *(Example(f"raw_loop/{path.name}", "", LOOP_RESULT) for path in sorted(FOLDER.glob("raw_loop/*.py"))),
    *(Example(f"{name}.ipynb", "", SCORE, f"sklearn {KERNEL}") for name in NOTEBOOKS),
    *(Example(f"imdb/{path.name}", IMDB, SCORE, f"{BERT} {ENGINES.get(path.stem, '')}") for path in REVIEWS),
]


def run(example: Example, timeout: float) -> tuple[str, str]:
    """Run an example in this folder, and return how it ended ("ok", "skipped", "failed") and its result."""
    if missing := [PIP_NAMES.get(each, each) for each in example.needs.split() if not importlib.util.find_spec(each)]:
        return "skipped", f"pip install {' '.join(missing)}"
    program = ["-c", IN_A_KERNEL] if example.name.endswith(".ipynb") else []
    command = [sys.executable, *program, str(FOLDER / example.name), *example.arguments.split()]
    log = LOGS / f"{example.name.replace('/', '-')}.txt"
    with log.open("w") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            return "failed", f"not over after {timeout:g} s; {log}"
    printed = log.read_text(errors="replace")
    if code:
        error = (re.findall(r"^(\w*Error\b.*)$", printed, re.MULTILINE) or [""])[-1][:80]
        return "skipped" if "is more than the 1 of" in error else "failed", f"exit code {code}; {error}; {log}"
    found = re.findall(rf"^{example.result}$", printed, re.MULTILINE)
    return ("ok", found[-1].strip()) if found else ("failed", f"printed no result; {log}")


def main():
    parser = argparse.ArgumentParser(description="Run the examples, and show what came out.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a name, such as gan.py or imdb/")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one example")
    options = parser.parse_args()
    chosen = [each for each in EXAMPLES if each.name.startswith(tuple(options.names) or "")]
    if unknown := [name for name in options.names if not any(each.name.startswith(name) for each in EXAMPLES)]:
        parser.error(f"no example begins with {unknown[0]}; there are {', '.join(each.name for each in EXAMPLES)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, example in enumerate(chosen, start=1):
        print(f"{number} of {len(chosen)}: {example.name}", end="  ", flush=True)
        start = time.perf_counter()
        state, result = run(example, options.timeout)
        print(state, flush=True)
        rows.append(f"{example.name:<34} {state:<8} {time.perf_counter() - start:>6.1f} s  {result}")
    failed = [row.split()[0] for row in rows if row.split()[1] == "failed"]
    print("", *rows, f"\nfailed: {', '.join(failed)}" if failed else "\nno example failed", sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
