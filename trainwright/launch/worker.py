"""What a worker runs to which work is handed over: `worker.py <folder>`.

Run by path. It first takes the search path of the process that hands over, so it imports nothing of the package before.
"""

import json
import sys


def main(folder: str) -> None:
    """Stand where the calling process stands, and do its work."""
    with open(f"{folder}/place.json", encoding="utf-8") as file:
        place = json.load(file)
    sys.path[:], sys.argv[:] = place["path"], place["argv"]
    from trainwright.launch.notebook import work

    work(folder)


if __name__ == "__main__":
    main(sys.argv[1])
