"""``python -m graphsrt``; under ``torchrun``: ``torchrun --nproc-per-node 2 -m graphsrt run …``."""

import sys

from graphsrt.cli import main

if __name__ == "__main__":
    sys.exit(main())
