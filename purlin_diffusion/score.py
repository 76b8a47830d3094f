"""How good drawn digits are, in two figures that cannot both be had by cheating.

A small classifier, trained on real digits, says how many show what was asked for. Blur and mode collapse pass it: images
near the mean of their class are easy to read. So the mean distance between two images of one class stands beside it,
relative to that of real ones: it falls with either, and what raises it (noise) costs accuracy.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from safetensors.torch import load_file
from torch import Tensor, nn

SIDE = 32  # pixels
WEIGHTS, FACTS = "model.safetensors", "facts.json"


@dataclass(frozen=True)
class Score:
    """`accuracy`: the part of the images read as the digit asked for. `diversity`: of a class, relative to real digits (1.0)."""

    accuracy: float
    diversity: float


class DigitNet(nn.Module):
    """Three convolutions and a matrix: n x 1 x 32 x 32 in 0..1 -> n x 10 logits."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in itertools.pairwise(widths)
        )
        self.dropout = nn.Dropout(0.3)
        self.linear = nn.Linear(64 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        for convolution in self.convolutions:
            images = nn.functional.gelu(convolution(images))
        logits: Tensor = self.linear(self.dropout(images.flatten(1)))
        return logits


@torch.inference_mode()
def score(images: Sequence[Image] | Tensor, digits: Sequence[int], *, folder: str | Path | None = None) -> Score:
    """Judge `images`, each of which should show the digit in `digits` at its place.

    images: PIL images of any size, or n x 1 x 32 x 32 in 0..1, white on black. At least two of some digit.
    folder: that of the classifier, as scripts/train_digits.py wrote it; None: the one that comes with the digits pipeline.

    Raises ValueError when the counts differ, or no digit comes twice.
    """
    pixels = images if isinstance(images, Tensor) else as_tensor(images)
    labels = torch.as_tensor(digits)
    if len(pixels) != len(labels):
        raise ValueError(f"score: `digits` needs one digit an image; got {len(labels)} for {len(pixels)} images")
    home = Path(folder) if folder is not None else shipped_classifier()
    real: list[float] = json.loads((home / FACTS).read_text())["distances"]
    ratios = [drawn / real[digit] for digit, drawn in distances(pixels, labels).items()]
    if not ratios:
        raise ValueError("score: `digits` needs a digit that comes twice, to measure diversity; got each once at most")
    right = load_classifier(home)(pixels).argmax(1) == labels
    return Score(accuracy=right.float().mean().item(), diversity=sum(ratios) / len(ratios))


def distances(pixels: Tensor, labels: Tensor) -> dict[int, float]:
    """Mean Euclidean distance between two images of one digit, for each digit that comes twice. pixels: n x 1 x h x w."""
    classes = {digit: pixels[labels == digit].flatten(1) for digit in range(10)}
    return {digit: nn.functional.pdist(some).mean().item() for digit, some in classes.items() if len(some) > 1}


def as_tensor(images: Sequence[Image]) -> Tensor:
    """n x 1 x 32 x 32 in 0..1."""
    arrays = [np.asarray(image.convert("L").resize((SIDE, SIDE)), dtype=np.float32) / 255 for image in images]
    return torch.from_numpy(np.stack(arrays))[:, None]


def load_classifier(folder: Path) -> DigitNet:
    classifier = DigitNet()
    classifier.load_state_dict({name: weight.float() for name, weight in load_file(folder / WEIGHTS).items()})
    return classifier.eval()


def shipped_classifier() -> Path:
    """Beside the trained pipeline. Its data is read, its code is not imported: pipelines stand above this package."""
    spec = importlib.util.find_spec("purlin_diffusion.pipelines")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("score: purlin_diffusion.pipelines is not installed. Pass the classifier's `folder`.")
    return Path(spec.origin).parent / "digits" / "classifier"
