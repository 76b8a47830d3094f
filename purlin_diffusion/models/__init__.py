"""One file of data a family."""

from purlin_diffusion.models import flux, sd3

PLANS = (flux.PLAN, sd3.PLAN)
