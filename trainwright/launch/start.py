"""Starts the launcher by path: `python -m` would let a file in the current directory replace a standard module."""

import os
import sys


def clean_search_path() -> None:
    """Remove this file's folder from the search path, and append the package's."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    sys.path.append(os.path.dirname(os.path.dirname(here)))


if __name__ == "__main__":
    clean_search_path()
    from trainwright.launch.processes import main

    sys.exit(main(sys.argv[1:]))
