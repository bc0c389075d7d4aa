"""Record the results of the cases under Lightning, which has to be installed: `python tests/compatibility/record.py`."""

from __future__ import annotations

import sys

import driver


def main() -> None:
    import lightning

    if lightning.__version__ != driver.VERSION:
        sys.exit(f"lightning {lightning.__version__} is installed, and the cases are those of {driver.VERSION}")
    driver.write(driver.EXPECTED, driver.results("lightning"))


if __name__ == "__main__":
    main()
