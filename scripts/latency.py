"""`python scripts/latency.py ...` is `python -m purlin_diffusion latency ...`: pip does not install scripts/."""

import sys

from purlin_diffusion.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["latency", *sys.argv[1:]]))
