"""One file of data a family."""

from purlin_diffusion.models import flux, qwenimage, sd3

PLANS = (flux.PLAN, qwenimage.PLAN, sd3.PLAN)
