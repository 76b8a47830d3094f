"""`python scripts/doctor.py ...` is `python -m purlin_diffusion doctor ...`: pip does not install scripts/."""

import sys

from purlin_diffusion.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
