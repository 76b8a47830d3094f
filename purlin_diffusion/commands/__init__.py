"""The commands of `python -m purlin_diffusion`, a module each: add_arguments(parser), run(args) -> exit code.

Their top levels import nothing heavy, so that --help is instant: torch and diffusers come inside functions.
"""
