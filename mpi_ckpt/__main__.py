"""`python -m mpi_ckpt VERB ...`, and the console script `mpi-ckpt`."""

import sys

from mpi_ckpt import cli


def main() -> None:
    """Run the command line and leave with its status."""
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
