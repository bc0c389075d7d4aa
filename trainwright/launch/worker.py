"""What a worker of `notebook.py` runs: `worker.py <folder>`.

Run by path. It imports nothing of the package before it has set the search path of the calling process.
"""

import json
import sys


def main(folder: str) -> None:
    """Take over the calling process's search path and arguments, and do its work."""
    with open(f"{folder}/search_path.json", encoding="utf-8") as file:
        paths = json.load(file)
    sys.path[:], sys.argv[:] = paths["path"], paths["argv"]
    from trainwright.launch.notebook import work

    work(folder)


if __name__ == "__main__":
    main(sys.argv[1])
