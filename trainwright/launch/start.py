"""Starts the launcher by path, so that no file of the user's can take the place of a standard module.

`python -m` would put the current directory first in the search path, where the user's own run may not have it.
"""

import os
import sys


def clean_search_path() -> None:
    """Drop this file's folder from the search path, and add the package's own place at the end."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    sys.path.append(os.path.dirname(os.path.dirname(here)))


if __name__ == "__main__":
    clean_search_path()
    from trainwright.launch.processes import main

    sys.exit(main(sys.argv[1:]))
