"""`python scripts/generate.py ...` is `python -m purlin_diffusion generate ...`: pip does not install scripts/."""

import sys

from purlin_diffusion.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
