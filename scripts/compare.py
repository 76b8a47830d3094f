"""`python scripts/compare.py ...` is `python -m purlin_diffusion compare ...`: pip does not install scripts/."""

import sys

from purlin_diffusion.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
